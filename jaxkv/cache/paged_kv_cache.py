"""The paged key/value cache: preallocated pages, block tables, reference counts; a pytree with pure operations.

    block_tables[row] -> [ 7 | 3 | 9 | 0 | 0 ]     entry i holds positions i * page_size ... (i + 1) * page_size - 1
                            |   |   |
    k_pages[layer]   [num_pages, kv_heads, page_size, head_dim]     (v_pages alike)

Page 0 is the null page: unused table entries and padding point at it, nothing live is ever in it. What a row's entries mean:

    index < lengths // page_size          full pages, any number of rows may share them
    the next, if lengths % page_size      partly filled, may be shared: copied before the first write (copy-on-write)
    further entries != 0                  allocated, still empty, never shared
    entries == 0                          nothing

Free pages stand on a stack, `free_pages[:num_free]`; a page's reference count is the number of table entries that name it.
No operation loops over pages or tokens. The cache does not know requests, prompts or priorities.

Axis words used everywhere in jaxkv: batch seqs chunk seq heads kv_heads head_dim hidden vocab num_pages page_size pages_per_seq layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxkv.cache.pages import Pages, copied
from jaxkv.cache.report import Bookkeeping, CacheStats, cache_stats, find_faults
from jaxkv.config import CacheConfig, ModelConfig


def when(pred: Array, update: Callable[[Any], Any], state: Any) -> Any:
    """`update(state)` where `pred` holds, else `state`.

    A loop of at most one turn: XLA updates a loop's state in place, where `lax.cond` would copy the pages.
    """
    return lax.while_loop(lambda s: s[0], lambda s: (jnp.zeros_like(s[0]), update(s[1])), (pred, state))[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of `seqs` sequences in pages.

    Make one with `PagedKVCache.create`. Every operation returns a new cache; donate the old one (or work inside one jit), or
    else each step copies the whole pool. Source: PagedAttention, Kwon et al. 2023 (arXiv:2309.06180).

    Attributes:
      k_pages, v_pages: one array a layer, `[num_pages, kv_heads, page_size, head_dim]`.
      block_tables: i32[seqs, pages_per_seq], pages of each row in order of position.
      lengths: i32[seqs], tokens valid per row.
      ref_counts: i32[num_pages], table entries that name each page; 0 for free pages and the null page.
      free_pages, num_free: i32[num_pages] and i32[], a stack whose first `num_free` entries are the free pages.
      out_of_pages: bool[seqs], rows that an `allocate` could not serve; they keep what they had and take no more tokens
        until `free` or `fork` gives them a new start.
    """

    k_pages: tuple[Array, ...] = dataclasses.field(repr=False)  # contents are megabytes
    v_pages: tuple[Array, ...] = dataclasses.field(repr=False)
    block_tables: Int[Array, "seqs pages_per_seq"]
    lengths: Int[Array, " seqs"]
    ref_counts: Int[Array, " num_pages"]
    free_pages: Int[Array, " num_pages"]
    num_free: Int[Array, ""]
    out_of_pages: Bool[Array, " seqs"]

    @classmethod
    def create(
        cls, config: ModelConfig, *, num_pages: int, page_size: int = 16, max_seqs: int, max_seq_len: int, dtype: str | None = None,
    ) -> "PagedKVCache":  # fmt: skip
        """An empty cache for a model.

        Args:
          config: of the model: layers, kv_heads, head_dim, and the dtype unless `dtype` says otherwise.
          num_pages: pages in the pool, the null page included, >= 2.
          page_size: tokens a page holds.
          max_seqs: rows.
          max_seq_len: tokens one row may hold.
          dtype: "float32", "bfloat16" or "float16".

        Raises:
          ValueError: a size is out of range, or one row may hold more tokens than the model allows.
        """
        sizes = CacheConfig(num_pages, page_size, max_seqs, max_seq_len, config.dtype if dtype is None else dtype)
        if max_seq_len > config.max_seq_len:
            raise ValueError(f"max_seq_len is {max_seq_len}, but the model allows {config.max_seq_len} tokens")
        shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
        stack = jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32)  # page 1 on top; the null page behind the stack's end
        return cls(
            k_pages=tuple(jnp.zeros(shape, sizes.dtype) for _ in range(config.num_layers)),
            v_pages=tuple(jnp.zeros(shape, sizes.dtype) for _ in range(config.num_layers)),
            block_tables=jnp.zeros((max_seqs, sizes.pages_per_seq), jnp.int32),
            lengths=jnp.zeros(max_seqs, jnp.int32),
            ref_counts=jnp.zeros(num_pages, jnp.int32),
            free_pages=stack,
            num_free=jnp.asarray(num_pages - 1, jnp.int32),
            out_of_pages=jnp.zeros(max_seqs, bool),
        )

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.k_pages[0].shape[2]

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.ref_counts.shape[0]

    @property
    def max_seqs(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @property
    def pages_per_seq(self) -> int:
        """Width of the block tables."""
        return self.block_tables.shape[1]

    @property
    def pages(self) -> tuple[Pages, ...]:
        """Keys and values of each layer, as attention takes them."""
        return tuple(Pages(k, v) for k, v in zip(self.k_pages, self.v_pages, strict=True))

    def with_pages(self, pages: tuple[Pages, ...]) -> "PagedKVCache":
        """The cache with other contents."""
        return dataclasses.replace(self, k_pages=tuple(p.k for p in pages), v_pages=tuple(p.v for p in pages))

    def pages_held(self) -> Int[Array, " seqs"]:
        """Pages in each row's table."""
        return jnp.sum(self.block_tables != 0, axis=1, dtype=jnp.int32)

    def pages_needed(self, num_tokens: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
        """Free pages that `allocate(num_tokens)` takes for each row, those for copy-on-write included."""
        return self._needs(num_tokens, num_tokens > 0)[0]

    def _needs(self, num_tokens: Array, writers: Array) -> tuple[Array, Array]:
        """Pages each writing row takes, and which rows copy their last page first.

        Of the writers that share a page all but as many as are needed copy: when every owner writes, the last one keeps it.
        """
        grow = jnp.maximum(-(-(self.lengths + num_tokens) // self.page_size) - self.pages_held(), 0)
        entry = jnp.clip(self.lengths // self.page_size, 0, self.pages_per_seq - 1)
        page = jnp.take_along_axis(self.block_tables, entry[:, None], axis=1)[:, 0]
        partly = writers & (self.lengths % self.page_size != 0)
        row = jnp.arange(self.max_seqs)
        earlier = partly[None, :] & (page[None, :] == page[:, None]) & (row[None, :] < row[:, None])
        copies = partly & (self.ref_counts[page] - jnp.sum(earlier, axis=1) > 1)
        return jnp.where(writers, grow + copies.astype(jnp.int32), 0), copies

    @functools.partial(jax.jit, static_argnames="max_tokens", inline=True)  # outside jit its loops would compile at every call
    def allocate(self, num_tokens: Int[Array, " seqs"], *, max_tokens: int | None = None) -> "PagedKVCache":
        """Room for more tokens; `lengths` stay as they are.

        Rows are served in order; a row gets all it needs or nothing, and is then reported in `out_of_pages`, while rows
        after it that still fit are served. A partly filled last page that other rows share is copied first.

        Args:
          num_tokens: tokens to make room for behind each row's length, >= 0.
          max_tokens: a static bound on `num_tokens`, which keeps the work small; by default any row may take a whole table.
        """
        num_tokens = jnp.asarray(num_tokens, jnp.int32)
        wants = (num_tokens > 0) & ~self.out_of_pages
        fits_table = self.lengths + num_tokens <= self.pages_per_seq * self.page_size

        def too_many(rows: Array) -> Array:
            need = self._needs(num_tokens, rows)[0]
            return rows & (need > 0) & (jnp.cumsum(need) > self.num_free)

        def drop_first(rows: Array) -> Array:
            return rows & (jnp.arange(self.max_seqs) != jnp.argmax(too_many(rows)))

        served = lax.while_loop(lambda rows: jnp.any(too_many(rows)), drop_first, wants & fits_table)
        refused = (num_tokens > 0) & ~served
        cache = dataclasses.replace(self, out_of_pages=self.out_of_pages | refused)
        need, copies = self._needs(num_tokens, served)
        take = _Take(need, copies, self._width(max_tokens))
        return when(jnp.any(need > 0), lambda c: c._take(take), cache)

    def _width(self, max_tokens: int | None) -> int:
        """Most pages one row can take: those of its new tokens, a first partly filled one, a copied one."""
        most = self.pages_per_seq + 1
        return most if max_tokens is None else min(-(-max_tokens // self.page_size) + 2, most)

    def _take(self, take: "_Take") -> "PagedKVCache":
        """Move pages from the stack into the tables, copying contents where a shared page is about to be written."""
        held, copies = self.pages_held(), take.copies.astype(jnp.int32)
        nth = jnp.arange(take.width, dtype=jnp.int32)[None, :]
        taken = nth < take.need[:, None]
        top = self.num_free - 1 - (jnp.cumsum(take.need) - take.need)[:, None] - nth
        page = self.free_pages.at[jnp.where(taken, top, self.num_pages)].get(mode="fill", fill_value=0)

        last = self.lengths // self.page_size  # the partly filled page of a row that copies: its first new page goes there
        entry = jnp.where((nth == 0) & take.copies[:, None], last[:, None], (held - copies)[:, None] + nth)
        rows = jnp.broadcast_to(jnp.arange(self.max_seqs, dtype=jnp.int32)[:, None], entry.shape)
        tables = self.block_tables.at[rows, jnp.where(taken, entry, self.pages_per_seq)].set(page, mode="drop")

        clipped = jnp.clip(last, 0, self.pages_per_seq - 1)[:, None]
        old = jnp.where(take.copies, jnp.take_along_axis(self.block_tables, clipped, axis=1)[:, 0], 0)
        new = jnp.where(take.copies, page[:, 0], 0)
        counts = self.ref_counts.at[jnp.where(taken, page, self.num_pages)].set(1, mode="drop")
        counts = counts.at[jnp.where(take.copies, old, self.num_pages)].add(-1, mode="drop")

        def copy(pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
            return jax.tree.map(lambda x: copied(x, old, new), pages)

        pages = when(jnp.any(take.copies), copy, self.pages)
        cache = dataclasses.replace(
            self, block_tables=tables, ref_counts=counts, num_free=self.num_free - jnp.sum(take.need, dtype=jnp.int32)
        )
        return cache.with_pages(pages)

    def advance(self, num_tokens: Int[Array, " seqs"]) -> "PagedKVCache":
        """Count tokens as held; room for them must have been allocated."""
        return dataclasses.replace(self, lengths=self.lengths + num_tokens)

    @functools.partial(jax.jit, inline=True)
    def free(self, rows: ArrayLike) -> "PagedKVCache":
        """Empty rows; pages that no other row names return to the pool.

        Args:
          rows: bool[seqs], or row numbers (those out of range are ignored).
        """
        rows, none = self._mask(rows), jnp.zeros_like(self.lengths)
        return when(jnp.any(rows), lambda c: c.assign(rows, none, none), self)

    def pages_freed_by(self, rows: Bool[Array, " seqs"]) -> Int[Array, ""]:
        """Pages that freeing the rows would return to the pool: those that no other row names."""
        lost = jnp.where(rows[:, None] & (self.block_tables != 0), self.block_tables, self.num_pages)
        named = jnp.zeros(self.num_pages, jnp.int32).at[lost].add(1, mode="drop")
        return jnp.sum((named > 0) & (named == self.ref_counts), dtype=jnp.int32)

    def _mask(self, rows: ArrayLike) -> Array:
        rows = jnp.asarray(rows)
        if rows.dtype == bool:
            return rows
        return jnp.zeros(self.max_seqs, bool).at[self._in_range(rows)].set(True, mode="drop")

    def _in_range(self, rows: ArrayLike) -> Array:
        """Row numbers with negative ones moved out of range: index -1 would wrap to the last row."""
        rows = jnp.atleast_1d(jnp.asarray(rows, jnp.int32))
        return jnp.where(rows < 0, self.max_seqs, rows)

    def fork(self, src: ArrayLike, dst: ArrayLike, *, lengths: ArrayLike | None = None) -> "PagedKVCache":
        """Rows `dst` become copies of rows `src` that share their pages; what `dst` held is freed. No page is copied.

        All at once: a row may be source and destination, so that `fork(order, arange(seqs))` permutes the rows.

        Args:
          src, dst: row numbers, i32[n] or scalars; pairs with a number out of range are ignored; no `dst` twice.
          lengths: i32[n], share only this many first tokens; by default all.
        """
        src, dst = self._in_range(src), self._in_range(dst)
        dst = jnp.where(src < self.max_seqs, dst, self.max_seqs)
        source = jnp.arange(self.max_seqs, dtype=jnp.int32).at[dst].set(src, mode="drop")
        rows = jnp.zeros(self.max_seqs, bool).at[dst].set(True, mode="drop")
        held = self.lengths[source]
        if lengths is not None:
            cut = jnp.atleast_1d(jnp.asarray(lengths, jnp.int32))
            held = jnp.minimum(held, held.at[dst].set(cut, mode="drop"))
        return self.assign(rows, source, held)

    def truncate(self, lengths: Int[Array, " seqs"]) -> "PagedKVCache":
        """Forget every row's tokens from `lengths` on (longer than held: nothing); pages without tokens are freed.

        `out_of_pages` stays: which tokens a row lost, and whether they are cut off now, the cache does not know.
        """
        keep = jnp.minimum(self.lengths, lengths)
        cache = self.assign(jnp.ones(self.max_seqs, bool), jnp.arange(self.max_seqs, dtype=jnp.int32), keep)
        return dataclasses.replace(cache, out_of_pages=self.out_of_pages)

    def assign(self, rows: Array, source: Array, lengths: Array) -> "PagedKVCache":
        """Rows of the mask become the first `lengths` tokens of row `source`, sharing its pages; length 0 frees a row.

        The one operation behind `fork`, `truncate` and the scheduler's admissions.

        Args:
          rows: bool[seqs], the rows to change.
          source: i32[seqs], where each of them gets its pages from.
          lengths: i32[seqs], tokens to keep, at most those of the source; negative is 0.
        """
        lengths = jnp.maximum(lengths, 0)
        used = -(-lengths // self.page_size)
        entry = jnp.arange(self.pages_per_seq, dtype=jnp.int32)[None, :]
        tables = jnp.where(entry < used[:, None], self.block_tables[source], 0)
        cache = dataclasses.replace(self, out_of_pages=jnp.where(rows, False, self.out_of_pages))
        return cache._retable(rows, tables, lengths)

    def _retable(self, rows: Array, tables: Array, lengths: Array) -> "PagedKVCache":
        """Give the rows of the mask other tables; counts follow, and pages that nobody names any more are freed."""
        outside = self.num_pages
        gained = jnp.where(rows[:, None] & (tables != 0), tables, outside).reshape(-1)
        lost = jnp.where(rows[:, None] & (self.block_tables != 0), self.block_tables, outside).reshape(-1)
        counts = self.ref_counts.at[gained].add(1, mode="drop").at[lost].add(-1, mode="drop")
        # A page that several rows lose at once must be freed once: by the last of the entries that name it.
        nth = jnp.arange(lost.shape[0], dtype=jnp.int32)
        last = jnp.zeros(self.num_pages, jnp.int32).at[lost].max(nth, mode="drop")
        freed = (lost != outside) & (counts.at[lost].get(mode="fill", fill_value=1) == 0)
        freed &= last.at[lost].get(mode="fill", fill_value=-1) == nth
        place = jnp.where(freed, self.num_free + jnp.cumsum(freed) - 1, outside)
        return dataclasses.replace(
            self,
            block_tables=jnp.where(rows[:, None], tables, self.block_tables),
            lengths=jnp.where(rows, lengths, self.lengths),
            ref_counts=counts,
            free_pages=self.free_pages.at[place].set(lost, mode="drop"),
            num_free=self.num_free + jnp.sum(freed, dtype=jnp.int32),
        )

    def check(self) -> None:
        """Verify the bookkeeping on the host.

        Raises:
          ValueError: a page leaks, is freed twice or owned twice without a count, a table names a free page, ...; names all.
        """
        if faults := find_faults(self.bookkeeping()):
            raise ValueError("cache is inconsistent: " + "; ".join(faults))

    def stats(self) -> CacheStats:
        """Numbers about the cache, read back to the host."""
        return cache_stats(self.bookkeeping())

    def bookkeeping(self) -> Bookkeeping:
        """Tables, lengths, counts and the free stack, read back to the host; what `jaxkv.viz` draws."""
        tables, lengths, counts, free = map(np.asarray, (self.block_tables, self.lengths, self.ref_counts, self.free_pages))
        return Bookkeeping(tables, lengths, counts, free, int(self.num_free), self.page_size)

    def _repr_html_(self) -> str:
        from jaxkv.viz.cache_picture import picture  # only here: a cache that nobody looks at needs no pictures

        return picture(self.bookkeeping()).html


class _Take(NamedTuple):
    """What `allocate` decided: pages per row, rows that copy their last page, and the most pages one row can take."""

    need: Array
    copies: Array
    width: int
