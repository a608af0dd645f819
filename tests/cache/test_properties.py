"""Random sequences of cache operations against a cache made of Python lists.

The oracle knows nothing of stacks, counts or tables: a page is an object, a row a list of pages and a list of tokens. Every
token ever written has a value of its own, so a page that is shared, copied or reused wrongly shows in what a row reads back.
"""

import dataclasses
import functools
import itertools
from typing import Any

import decoders
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import jaxkv
from jaxkv import PagedKVCache
from jaxkv.cache.pages import Pages

SEQS, MAX_LEN, MOST = 4, 24, 12
SIZES = {1: 40, 3: 14, 16: 7}  # page size -> pages: enough for some rows, never for all

row_counts = st.lists(st.one_of(st.just(0), st.integers(1, MOST)), min_size=SEQS, max_size=SEQS)
row_number = st.integers(-2, SEQS + 1)  # some out of range


class Page:
    """Compared by identity."""


@dataclasses.dataclass
class Row:
    tokens: list[int] = dataclasses.field(default_factory=list)
    pages: list[Page] = dataclasses.field(default_factory=list)
    stuck: bool = False

    def first(self, length: int, page_size: int) -> "Row":
        return Row(self.tokens[:length], self.pages[: -(-length // page_size)])


class Oracle:
    def __init__(self, num_pages: int, page_size: int):
        self.total, self.page_size = num_pages - 1, page_size
        self.capacity = -(-MAX_LEN // page_size) * page_size
        self.rows = [Row() for _ in range(SEQS)]

    def owners(self, page: Page) -> int:
        return sum(p is page for row in self.rows for p in row.pages)

    @property
    def used(self) -> int:
        return len({id(p) for row in self.rows for p in row.pages})

    def allocate(self, num_tokens: list[int]) -> list[bool]:
        served = []
        for row, n in zip(self.rows, num_tokens, strict=True):
            served.append(n > 0 and not row.stuck and self._allocate(row, n))
            row.stuck |= n > 0 and not served[-1]
        return served

    def _allocate(self, row: Row, n: int) -> bool:
        after, last = len(row.tokens) + n, len(row.tokens) // self.page_size
        if after > self.capacity:
            return False
        copy = len(row.tokens) % self.page_size != 0 and self.owners(row.pages[last]) > 1
        grow = max(-(-after // self.page_size) - len(row.pages), 0)
        if grow + copy > self.total - self.used:
            return False
        if copy:
            row.pages[last] = Page()
        row.pages += [Page() for _ in range(grow)]
        return True

    def assign(self, changes: dict[int, tuple[int, int]]) -> None:
        """row -> (source, length), all at once."""
        new = {row: self.rows[source].first(length, self.page_size) for row, (source, length) in changes.items()}
        for row, value in new.items():
            self.rows[row] = value


@functools.partial(jax.jit, donate_argnums=0)
def reserve(cache: PagedKVCache, num_tokens: jax.Array) -> PagedKVCache:
    return cache.allocate(num_tokens)


@functools.partial(jax.jit, donate_argnums=0)
def append(cache: PagedKVCache, num_tokens: jax.Array, values: jax.Array) -> PagedKVCache:
    """Allocate, write, advance: what `extend` does to a cache, with plain indexing."""
    cache = cache.allocate(num_tokens, max_tokens=MOST)
    count = jnp.where(cache.out_of_pages, 0, num_tokens)
    nth = jnp.arange(MOST)[None, :]
    position = cache.lengths[:, None] + nth
    entry = jnp.minimum(position // cache.page_size, cache.pages_per_seq - 1)
    page = jnp.take_along_axis(cache.block_tables, entry, axis=1)
    page = jnp.where(nth < count[:, None], page, cache.num_pages)

    def written(pages: tuple[jax.Array, ...], sign: float) -> tuple[jax.Array, ...]:
        new = [sign * values + 0.25 * layer for layer in range(len(pages))]
        return tuple(x.at[page, 0, position % cache.page_size, 0].set(y, mode="drop") for x, y in zip(pages, new, strict=True))

    k, v = written(tuple(p.k for p in cache.pages), 1.0), written(tuple(p.v for p in cache.pages), -1.0)
    cache = cache.with_pages(tuple(map(Pages, k, v)))
    return cache.advance(count)


@functools.partial(jax.jit, donate_argnums=0)
def fork(cache: PagedKVCache, src: jax.Array, dst: jax.Array) -> PagedKVCache:
    return cache.fork(src, dst)


@functools.partial(jax.jit, donate_argnums=0)
def fork_first(cache: PagedKVCache, src: jax.Array, dst: jax.Array, lengths: jax.Array) -> PagedKVCache:
    return cache.fork(src, dst, lengths=lengths)


@functools.partial(jax.jit, donate_argnums=0)
def free(cache: PagedKVCache, rows: jax.Array) -> PagedKVCache:
    return cache.free(rows)


@functools.partial(jax.jit, donate_argnums=0)
def truncate(cache: PagedKVCache, lengths: jax.Array) -> PagedKVCache:
    return cache.truncate(lengths)


@functools.partial(jax.jit, donate_argnums=0)
def assign(cache: PagedKVCache, rows: jax.Array, source: jax.Array, lengths: jax.Array) -> PagedKVCache:
    return cache.assign(rows, source, lengths)


def ints(values: Any) -> jax.Array:
    return jnp.asarray(list(values), jnp.int32)


class CacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from(sorted(SIZES)))
    def create(self, page_size: int):
        config = decoders.config(num_heads=1, num_kv_heads=1, head_dim=2, rope=jaxkv.Rope(rotary_dim=2))
        pages = SIZES[page_size]
        self.cache = PagedKVCache.create(config, num_pages=pages, page_size=page_size, max_seqs=SEQS, max_seq_len=MAX_LEN)
        self.oracle, self.values = Oracle(pages, page_size), itertools.count(1)

    @rule(num_tokens=row_counts)
    def append(self, num_tokens: list[int]):
        served = self.oracle.allocate(num_tokens)
        values = np.zeros((SEQS, MOST), np.float32)
        for i, row in enumerate(self.oracle.rows):
            new = [next(self.values) for _ in range(num_tokens[i])]
            values[i, : len(new)] = new
            if served[i]:
                row.tokens += new
        self.cache = append(self.cache, ints(num_tokens), jnp.asarray(values))

    @rule(num_tokens=row_counts)
    def reserve(self, num_tokens: list[int]):
        self.oracle.allocate(num_tokens)
        self.cache = reserve(self.cache, ints(num_tokens))

    @rule(
        pairs=st.lists(st.tuples(row_number, row_number), max_size=SEQS, unique_by=lambda p: p[1]),
        lengths=st.none() | st.lists(st.integers(-1, MAX_LEN), min_size=SEQS, max_size=SEQS),
    )
    def fork(self, pairs: list[tuple[int, int]], lengths: list[int] | None):
        changes = {}
        for i, (src, dst) in enumerate(pairs):
            if src in range(SEQS) and dst in range(SEQS):
                held = len(self.oracle.rows[src].tokens)
                changes[dst] = (src, held if lengths is None else min(held, max(lengths[i], 0)))
        self.oracle.assign(changes)
        padded = pairs + [(0, SEQS + 9)] * (SEQS - len(pairs))
        src, dst = (ints(p[i] for p in padded) for i in (0, 1))
        self.cache = fork(self.cache, src, dst) if lengths is None else fork_first(self.cache, src, dst, ints(lengths))

    @rule(rows=st.lists(row_number, min_size=3, max_size=3), by_mask=st.booleans())
    def free(self, rows: list[int], by_mask: bool):
        inside = [r for r in rows if r in range(SEQS)]
        self.oracle.assign({r: (r, 0) for r in inside})
        mask = jnp.asarray([r in inside for r in range(SEQS)])
        self.cache = free(self.cache, mask if by_mask else ints(rows))

    @rule(lengths=st.lists(st.integers(-1, MAX_LEN + 5), min_size=SEQS, max_size=SEQS))
    def truncate(self, lengths: list[int]):
        stuck = [row.stuck for row in self.oracle.rows]
        self.oracle.assign(
            {r: (r, min(len(row.tokens), max(n, 0))) for r, (row, n) in enumerate(zip(self.oracle.rows, lengths, strict=True))}
        )
        for row, was in zip(self.oracle.rows, stuck, strict=True):
            row.stuck = was
        self.cache = truncate(self.cache, ints(lengths))

    @rule(data=st.data(), mask=st.lists(st.booleans(), min_size=SEQS, max_size=SEQS))
    def assign(self, data: st.DataObject, mask: list[bool]):
        source = data.draw(st.lists(st.integers(0, SEQS - 1), min_size=SEQS, max_size=SEQS))
        lengths = [data.draw(st.integers(0, len(self.oracle.rows[s].tokens))) for s in source]
        self.oracle.assign({r: (source[r], lengths[r]) for r in range(SEQS) if mask[r]})
        self.cache = assign(self.cache, jnp.asarray(mask), ints(source), ints(lengths))

    @invariant()
    def books_agree(self):
        if not hasattr(self, "cache"):
            return
        rows = self.oracle.rows
        self.cache.check()
        stats = self.cache.stats()
        assert stats.pages_used == self.oracle.used
        assert stats.pages_free + stats.pages_used == self.cache.num_pages - 1
        assert stats.tokens == sum(len(row.tokens) for row in rows)
        assert self.cache.lengths.tolist() == [len(row.tokens) for row in rows]
        assert self.cache.out_of_pages.tolist() == [row.stuck for row in rows]
        assert self.cache.pages_held().tolist() == [len(row.pages) for row in rows]

    @invariant()
    def every_row_reads_its_own_tokens(self):
        if not hasattr(self, "cache"):
            return
        tables, size = np.asarray(self.cache.block_tables), self.cache.page_size
        for array, sign in ((0, 1), (1, -1)):
            for layer, layer_pages in enumerate(self.cache.pages):
                pages = np.asarray(layer_pages[array])
                for i, row in enumerate(self.oracle.rows):
                    position = np.arange(len(row.tokens))
                    read = pages[tables[i, position // size], 0, position % size, 0]
                    np.testing.assert_array_equal(read, sign * np.asarray(row.tokens, np.float32) + 0.25 * layer)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestCacheMachineLong(CacheMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
