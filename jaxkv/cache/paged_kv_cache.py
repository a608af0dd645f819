"""The paged key/value cache: pages, block tables and the free list together, a pytree with pure operations.

    PagedKVCache = pages (what is stored)  +  tables (which page holds which positions)  +  free list (which pages are free)

Each of the three has one owner: `jaxkv.cache.pages`, `jaxkv.cache.tables` and `jaxkv.cache.free_list`. Here stands what needs several of
them at once. Layers share one set of tables and one free list; layers that see a window only could have a second pair of them.

No operation loops over pages or tokens. The cache does not know requests, prompts or priorities.

Axis words used everywhere in jaxkv: batch seqs chunk seq heads kv_heads head_dim hidden vocab num_pages page_size pages_per_seq layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxkv.cache.allocation import pages_needed, rows_served
from jaxkv.cache.free_list import FreeList
from jaxkv.cache.pages import Pages
from jaxkv.cache.readings import Readings
from jaxkv.cache.tables import Tables
from jaxkv.config import CacheConfig, ModelConfig, integer, shown
from jaxkv.sharding import keeps_axes, within
from pallas_kernels.varying import while_loop


def when(pred: Array, update: Callable[[Any], Any], state: Any) -> Any:
    """`update(state)` where `pred` holds, else `state`.

    A loop of at most one turn: XLA updates a loop's state in place, where `lax.cond` would copy the pages.
    """
    return while_loop(lambda s: s[0], lambda s: (jnp.zeros_like(s[0]), update(s[1])), (pred, state))[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PagedKVCache(Readings):
    """Keys and values of `seqs` sequences in pages.

    Make one with `PagedKVCache.create`. Every operation returns a new cache; donate the old one (or work inside one jit), or
    else each step copies the whole pool. Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180).

    Attributes:
      pages: one `Pages` a layer, `k` and `v` `[num_pages, kv_heads, page_size, head_dim]`.
      tables: block tables and lengths of all rows.
      free_list: reference counts, the stack of free pages, and the rows that were refused pages.
    """

    pages: tuple[Pages, ...]
    tables: Tables
    free_list: FreeList

    @classmethod
    def create(
        cls, config: ModelConfig, *, num_pages: int, page_size: int = 16, max_seqs: int, max_seq_len: int,
        dtype: str | None = None, mesh: Mesh | None = None,
    ) -> "PagedKVCache":  # fmt: skip
        """An empty cache for a model.

        Args:
          config: of the model: layers, kv_heads, head_dim, and the dtype unless `dtype` says otherwise.
          num_pages: pages in the pool, the null page included, >= 2.
          page_size: tokens a page holds.
          max_seqs: rows.
          max_seq_len: tokens one row may hold.
          dtype: "float32", "bfloat16" or "float16", or "int8", "float8_e4m3fn" or "float8_e5m2", which store a scale for each
            key and value of a head.
          mesh: devices to split the pages over by kv head, with an axis "tensor", as the model's weights (`model.mesh`).

        Raises:
          ValueError: a size is out of range, one row may hold more tokens than the model allows, or the mesh does not fit.
        """
        sizes = CacheConfig(num_pages, page_size, max_seqs, max_seq_len, dtype)
        return cls.of_sizes(config, sizes, mesh)

    @classmethod
    def of_sizes(cls, config: ModelConfig, sizes: CacheConfig, mesh: Mesh | None = None) -> "PagedKVCache":
        """`create` with all sizes in one hashable value, which can be a static argument of `jax.jit`.

        Args:
          config: as for `create`.
          sizes: `jaxkv.CacheConfig(num_pages=..., page_size=..., max_seqs=..., max_seq_len=...)`.
          mesh: as for `create`.

        Raises:
          ValueError: as `create`.
        """
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config must be a jaxkv.ModelConfig, model.config, got {shown(config)}")
        if not isinstance(sizes, CacheConfig):
            raise ValueError(f"sizes must be a jaxkv.CacheConfig, got {shown(sizes)}")
        if sizes.max_seq_len > config.max_seq_len:
            raise ValueError(f"max_seq_len is {sizes.max_seq_len}, but the model allows {config.max_seq_len} tokens")
        pages = lambda: tuple(Pages.create(config, sizes, mesh) for _ in range(config.num_layers))
        return within(lambda: cls(pages(), Tables.create(sizes), FreeList.create(sizes)))

    def with_pages(self, pages: tuple[Pages, ...]) -> "PagedKVCache":
        """The cache with other contents."""
        return dataclasses.replace(self, pages=pages)

    def pages_held(self) -> Int[Array, " seqs"]:
        """Pages in each row's table."""
        self.alive()
        return within(Tables.pages_held, self.tables)

    def pages_needed(self, num_tokens: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
        """Free pages that `allocate(num_tokens)` takes for each row, those for copy-on-write included."""
        self.alive()
        need = lambda tables, free_list, n: pages_needed(tables, free_list, n, n > 0)[0]
        return within(need, self.tables, self.free_list, num_tokens)

    def allocate(self, num_tokens: Int[Array, " seqs"], *, max_tokens: int | None = None) -> "PagedKVCache":
        """Room for more tokens; `lengths` stay as they are.

        Rows are served in order; a row gets all it needs or nothing, and is then reported in `out_of_pages`, while rows
        after it that still fit are served. A partly filled last page that other rows share is copied first.

        Args:
          num_tokens: tokens to make room for behind each row's length, >= 0.
          max_tokens: a static bound on `num_tokens`, which keeps the work small; by default any row may take a whole table.

        Raises:
          ValueError: the cache was donated.
        """
        self.alive()
        return self._allocate(num_tokens, max_tokens=None if max_tokens is None else integer("max_tokens", max_tokens, 0))

    @keeps_axes
    @functools.partial(jax.jit, static_argnames="max_tokens", inline=True)  # outside jit its loops would compile at every call
    def _allocate(self, num_tokens: Array, *, max_tokens: int | None) -> "PagedKVCache":
        num_tokens = jnp.asarray(num_tokens, jnp.int32)
        served = rows_served(self.tables, self.free_list, num_tokens)
        cache = self._with_out_of_pages(self.out_of_pages | ((num_tokens > 0) & ~served))
        need, copies = pages_needed(self.tables, self.free_list, num_tokens, served)
        width = self._most_pages(max_tokens)
        return when(jnp.any(need > 0), lambda c: c._take(need, copies, width), cache)

    @keeps_axes
    def reserve(self, num_tokens: Int[Array, " seqs"], *, max_tokens: int, shared: bool) -> "PagedKVCache":
        """`allocate` inside jit for a scheduler that has seen to it that every row gets its pages: a quarter of the program.

        Args:
          num_tokens: as for `allocate`.
          max_tokens: a static bound on `num_tokens`.
          shared: whether rows may share pages at all; where not, nothing that copies them is compiled.
        """
        width, need, copies = self._most_pages(max_tokens), self.tables.pages_missing(num_tokens), None
        if shared:
            need, copies = pages_needed(self.tables, self.free_list, num_tokens, num_tokens > 0)
        return when(jnp.any(need > 0), lambda c: c._take(need, copies, width), self)

    def _with_out_of_pages(self, rows: Array) -> "PagedKVCache":
        return dataclasses.replace(self, free_list=dataclasses.replace(self.free_list, out_of_pages=rows))

    def _most_pages(self, max_tokens: int | None) -> int:
        """Most pages one row can take: those of its new tokens, a first partly filled one, a copied one."""
        most = self.pages_per_seq + 1
        return most if max_tokens is None else min(-(-max_tokens // self.page_size) + 2, most)

    def _take(self, need: Array, copies: Array | None, width: int) -> "PagedKVCache":
        """Move pages from the stack into the tables, copying contents where a shared page is about to be written (None: nowhere)."""
        page, taken, free_list = self.free_list.take(need, width)
        if copies is None:
            return PagedKVCache(self.pages, self.tables.with_pages(page, taken, None), free_list)
        old = jnp.where(copies, self.tables.last_pages()[0], 0)
        new = jnp.where(copies, page[:, 0], 0)

        def copy(pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
            return tuple(p.with_copies(old, new) for p in pages)

        pages = when(jnp.any(copies), copy, self.pages)
        return PagedKVCache(pages, self.tables.with_pages(page, taken, copies), free_list.shared_less(old, copies))

    def advance(self, num_tokens: Int[Array, " seqs"]) -> "PagedKVCache":
        """Count tokens as held; room for them must have been allocated."""
        self.alive()
        return dataclasses.replace(self, tables=self.tables.advance(num_tokens))

    def free(self, rows: ArrayLike) -> "PagedKVCache":
        """Empty rows; pages that no other row names return to the pool.

        Args:
          rows: bool[seqs], or row numbers (those out of range are ignored).

        Raises:
          ValueError: the cache was donated.
        """
        self.alive()
        return self._free(rows)

    @keeps_axes
    @functools.partial(jax.jit, inline=True)
    def _free(self, rows: ArrayLike) -> "PagedKVCache":
        rows, none = self._mask(rows), jnp.zeros_like(self.lengths)
        return when(jnp.any(rows), lambda c: c.assign(rows, none, none), self)

    def pages_freed_by(self, rows: Bool[Array, " seqs"]) -> Int[Array, ""]:
        """Pages that freeing the rows would return to the pool: those that no other row names."""
        return self.free_list.freed_by_losing(self._named_by(rows, self.block_tables))

    def _named_by(self, rows: Array, tables: Array) -> Array:
        """The pages that rows of the mask name in these tables, and `num_pages` everywhere else."""
        return jnp.where(rows[:, None] & (tables != 0), tables, self.num_pages)

    def _mask(self, rows: ArrayLike) -> Array:
        rows = jnp.asarray(rows)
        if rows.dtype == bool:
            return rows
        return jnp.zeros(self.max_seqs, bool).at[self._in_range(rows)].set(True, mode="drop")

    def _in_range(self, rows: ArrayLike) -> Array:
        """Row numbers with negative ones moved out of range: index -1 would wrap to the last row."""
        rows = jnp.atleast_1d(jnp.asarray(rows, jnp.int32))
        return jnp.where(rows < 0, self.max_seqs, rows)

    @keeps_axes
    def fork(self, src: ArrayLike, dst: ArrayLike, *, lengths: ArrayLike | None = None) -> "PagedKVCache":
        """Rows `dst` become copies of rows `src` that share their pages; what `dst` held is freed. No page is copied.

        All at once: a row may be source and destination, so that `fork(order, arange(seqs))` permutes the rows.

        Args:
          src, dst: row numbers, i32[n] or scalars; pairs with a number out of range are ignored; no `dst` twice.
          lengths: i32[n], share only this many first tokens; by default all.
        """
        self.alive()
        src, dst = self._in_range(src), self._in_range(dst)
        dst = jnp.where(src < self.max_seqs, dst, self.max_seqs)
        source = jnp.arange(self.max_seqs, dtype=jnp.int32).at[dst].set(src, mode="drop")
        rows = jnp.zeros(self.max_seqs, bool).at[dst].set(True, mode="drop")
        held = self.lengths[source]
        if lengths is not None:
            cut = jnp.atleast_1d(jnp.asarray(lengths, jnp.int32))
            held = jnp.minimum(held, held.at[dst].set(cut, mode="drop"))
        return self.assign(rows, source, held)

    @keeps_axes
    def truncate(self, lengths: Int[Array, " seqs"]) -> "PagedKVCache":
        """Forget every row's tokens from `lengths` on (longer than held: nothing); pages without tokens are freed.

        `out_of_pages` stays: which tokens a row lost, and whether they are cut off now, the cache does not know.
        """
        self.alive()
        keep = jnp.minimum(self.lengths, lengths)
        cache = self.assign(jnp.ones(self.max_seqs, bool), jnp.arange(self.max_seqs, dtype=jnp.int32), keep)
        return cache._with_out_of_pages(self.out_of_pages)

    @keeps_axes
    def assign(self, rows: Array, source: Array, lengths: Array) -> "PagedKVCache":
        """Rows of the mask become the first `lengths` tokens of row `source`, sharing its pages; length 0 frees a row.

        The one operation behind `fork`, `truncate` and the scheduler's admissions.

        Args:
          rows: bool[seqs], the rows to change.
          source: i32[seqs], where each of them gets its pages from.
          lengths: i32[seqs], tokens to keep, at most those of the source; negative is 0.
        """
        self.alive()
        lengths = jnp.maximum(lengths, 0)
        tables = self.tables.prefixes(source, lengths)
        gained, lost = self._named_by(rows, tables).reshape(-1), self._named_by(rows, self.block_tables).reshape(-1)
        free_list = self.free_list.exchange(gained, lost)
        return PagedKVCache(
            self.pages,
            self.tables.replaced(rows, tables, lengths),
            dataclasses.replace(free_list, out_of_pages=jnp.where(rows, False, self.out_of_pages)),
        )

    def grown(self, *, num_pages: int, pages_per_seq: int) -> "PagedKVCache":
        """The same contents in a larger pool with wider tables; outside jit, copies the pool once and is not donated.

        Args:
          num_pages, pages_per_seq: new sizes, at least the old ones.
        """
        self.alive()
        return PagedKVCache(
            tuple(p.grown(num_pages) for p in self.pages), self.tables.widened(pages_per_seq), self.free_list.grown(num_pages)
        )

    def _repr_html_(self) -> str | None:
        if self.donated:
            return None  # a notebook then shows its repr
        from jaxkv.viz.cache_picture import picture  # only here: a cache that nobody looks at needs no pictures

        return picture(self.bookkeeping()).html


def check_cache(cache: Any) -> None:
    """Raise ValueError unless it is a `PagedKVCache` that was not donated."""
    if not isinstance(cache, PagedKVCache):
        raise ValueError(f"cache must be a jaxkv.PagedKVCache, got {shown(cache)}")
    cache.alive()
