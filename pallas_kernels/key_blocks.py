"""Where things are in paged attention: which positions a query sees, which rows of the pool a block of keys is in, and the gather.

A pool is gathered as 2-D rows of `gcd(page_size, block)` tokens (a view, never a copy): this form of the gather is a plain memory
copy on CPU, and it keeps the split positions for any page size, odd ones included.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import options as opts
from pallas_kernels.varying import vary_like


class Problem(NamedTuple):
    """One call in 4-D form: q [batch, queries, heads, head_dim], the rest as in the public operation."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    block_tables: jax.Array
    lengths: jax.Array
    num_queries: jax.Array
    sinks: jax.Array | None
    k_scales: jax.Array | None
    v_scales: jax.Array | None


class Queries(NamedTuple):
    """Where each row's queries are: at consecutive positions, the last one at the row's last token.

    Attributes:
      first: i32[rows], the position of the first query; below 0 where a row has more queries than tokens, which see nothing.
      count: i32[rows], how many of them are live: the first ones.
      window: how many positions back a query sees, itself included; None for all.
    """

    first: jax.Array
    count: jax.Array
    window: int | None

    @classmethod
    def of(cls, problem: Problem, window: int | None) -> Queries:
        """The queries of a call; lengths beyond the block tables are cut to them."""
        lengths = jnp.clip(problem.lengths, 0, problem.block_tables.shape[1] * problem.k_pages.shape[2])
        return cls(lengths - problem.num_queries, problem.num_queries, window)

    def tiles(self, width: int, tiles: int) -> Queries:
        """Each row as so many rows of `width` queries."""
        begin = lax.iota(jnp.int32, tiles)[None, :] * width
        count = jnp.clip(self.count[:, None] - begin, 0, width)
        return Queries((self.first[:, None] + begin).reshape(-1), count.reshape(-1), self.window)

    def alive(self, queries: int) -> jax.Array:
        """bool[rows, queries]: which of them are live and see a key, their own at least."""
        index = lax.iota(jnp.int32, queries)[None, :]
        return (index < self.count[:, None]) & (self.first[:, None] + index >= 0)

    def blocks(self, block: int) -> tuple[jax.Array, jax.Array]:
        """i32[rows] twice: the half-open range of blocks that any of a row's queries needs; empty for a dead row."""
        last = jnp.where(self.count > 0, jnp.maximum(self.first + self.count - 1, -1), -1)
        end = (last + block) // block
        begin = 0 if self.window is None else jnp.maximum(self.first - (self.window - 1), 0) // block
        return jnp.minimum(begin, end), end

    def visible(self, start: jax.Array, block: int, queries: int, kv_heads: int, q_per_kv: int) -> jax.Array:
        """bool[rows * kv_heads, queries * q_per_kv, block]: which keys of the block at position `start` i32[rows] each query sees."""
        index = lax.broadcasted_iota(jnp.int32, (1, queries, 1), 1)
        own = self.first[:, None, None] + index
        position = start[:, None, None] + lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
        seen = (position <= own) & (index < self.count[:, None, None])
        if self.window is not None:
            seen &= position > own - self.window
        rows = start.shape[0]
        seen = lax.broadcast_in_dim(seen, (rows, kv_heads, queries, q_per_kv, block), (0, 2, 4))
        return seen.reshape(rows * kv_heads, queries * q_per_kv, block)


def first_rows(blocks: jax.Array, block: int, shape: tuple[int, ...], block_tables: jax.Array, owner: jax.Array) -> jax.Array:
    """Rows of the 2-D view of a pool of `shape` that hold the tokens of block `blocks[i]`, i32[n], of row `owner[i]` of the tables,
    for the first kv head: i32[n, rows per block].

    Table entries that are out of range are clamped, and so is the position behind the table's last page: what is read there
    is masked later.
    """
    num_pages, kv_heads, page_size, _ = shape
    row_tokens = math.gcd(page_size, block)
    start = blocks[:, None] * block + (lax.iota(jnp.int32, block // row_tokens) * row_tokens)[None, :]
    column = jnp.clip(start // page_size, 0, block_tables.shape[1] - 1)
    page = jnp.clip(block_tables.at[owner[:, None], column].get(mode="promise_in_bounds"), 0, num_pages - 1)
    return page * (kv_heads * (page_size // row_tokens)) + (start % page_size) // row_tokens


def rows_of_heads(first: jax.Array, block: int, shape: tuple[int, ...]) -> jax.Array:
    """The rows of all kv heads, i32[n, kv_heads, rows per block], from those of the first one."""
    _, kv_heads, page_size, _ = shape
    rows_per_page = page_size // math.gcd(page_size, block)
    return first[:, None, :] + (lax.iota(jnp.int32, kv_heads) * rows_per_page)[None, :, None]


def order_of(x: jax.Array) -> jax.Array:
    """i32[n] that sorts x [n], equals in their order: `jnp.argsort` of whatever `jax_enable_x64` says."""
    return lax.sort_key_val(x, lax.iota(jnp.int32, x.shape[0]))[1]


class BlockSchedule(NamedTuple):
    """The blocks that rows hold, in the order in which they are computed: first blocks first, of rows with most blocks first.

    It depends on lengths and tables alone: the compiler makes one for all layers of a model.

    Attributes:
      order: i32[rows], the rows, those with most blocks first.
      before: i32[levels + 1], how many places blocks of lower levels take; a block's level is its number among its row's.
      level, row, start: i32[places], of the block at each place, and the position of its first key.
      queries: the queries of the block's row; none behind the last block.
      first_rows: i32[places, rows per block], where its keys are.
    """

    order: jax.Array
    before: jax.Array
    level: jax.Array
    row: jax.Array
    start: jax.Array
    queries: Queries
    first_rows: jax.Array

    @classmethod
    def of(cls, problem: Problem, queries: Queries, owner: jax.Array, block: int, room: int) -> BlockSchedule:
        """The schedule for rows of queries that read the rows `owner` i32[rows] of the tables; `room` places stay empty at its end."""
        begin, end = queries.blocks(block)
        held, rows = end - begin, owner.shape[0]
        order = order_of(-held)
        levels = -(-problem.block_tables.shape[1] * problem.k_pages.shape[2] // block)
        counts = jnp.sum(held[None, :] > lax.iota(jnp.int32, levels)[:, None], axis=1, dtype=jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        place = lax.iota(jnp.int32, levels * rows + room)
        level = jnp.searchsorted(before[1:], place, side="right", method="scan_unrolled").astype(jnp.int32)
        live = place < before[-1]
        row = order[jnp.where(live, place - before[level], 0)]
        count = jnp.where(live, queries.count[row], 0)
        number = begin[row] + level
        found = first_rows(number, block, problem.k_pages.shape, problem.block_tables, owner[row])
        own = Queries(queries.first[row], count, queries.window)
        return cls(order, before, level, row, number * block, own, found)

    def part(self, at: jax.Array, places: int) -> BlockSchedule:
        """So many places from `at` on."""
        cut = lambda x: lax.dynamic_slice_in_dim(x, at, places)
        own = self.queries._replace(first=cut(self.queries.first), count=cut(self.queries.count))
        return self._replace(
            level=cut(self.level), row=cut(self.row), start=cut(self.start), queries=own, first_rows=cut(self.first_rows)
        )


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x[rows] as [len(rows), the rest of a row], as a plain memory copy on CPU too.

    The gather stands in a branch that is always taken. Outside of one, XLA on CPU fuses it with the reshape behind it and the
    arithmetic of `rows` before it, and then copies number by number (docs/measurements.md, "Gather of pages in a branch").

    Narrow floats travel as integers: XLA on CPU turns a gather of bfloat16 into one of float32, and so converts the whole
    array at every call. The barrier keeps that change of type inside a loop around it, where it costs nothing; hoisted out of the
    loop it would be a copy of the array again.
    """
    dtype, width = jnp.dtype(x.dtype), math.prod(x.shape[1:])
    bits = opts.bits_of(dtype)
    x, rows = lax.optimization_barrier((x, rows))

    def gather(x: jax.Array, rows: jax.Array) -> jax.Array:
        flat = x.reshape(x.shape[0], width)  # in here: whatever makes x would else be computed in that shape, and slowly
        taken = lax.bitcast_convert_type(flat, bits).at[rows].get(mode="promise_in_bounds")
        return lax.bitcast_convert_type(taken, dtype)

    return lax.cond(rows[0] >= 0, gather, lambda x, rows: vary_like(jnp.zeros((rows.shape[0], width), dtype), x, rows), x, rows)


def gather_block(pages: jax.Array, rows: jax.Array, block: int) -> jax.Array:
    """One block of a pool: [num_pages, kv_heads, page_size, *features] -> [batch * kv_heads, block, *features]."""
    batch, kv_heads, _ = rows.shape
    row_tokens = math.gcd(pages.shape[2], block)
    features = pages.shape[3:]
    taken = take_rows(pages.reshape(-1, row_tokens * math.prod(features)), rows.reshape(-1))
    return taken.reshape(batch * kv_heads, block, *features)


def group_queries(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, queries, heads, head_dim] -> [batch * kv_heads, queries * q_per_kv, head_dim]."""
    batch, queries, heads, head_dim = q.shape
    q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch * kv_heads, -1, head_dim)


def ungroup_queries(x: jax.Array, batch: int, queries: int) -> jax.Array:
    """[batch * kv_heads, queries * q_per_kv, ...] -> [batch, queries, heads, ...]: the inverse of group_queries."""
    kv_heads, q_per_kv = x.shape[0] // batch, x.shape[1] // queries
    x = x.reshape(batch, kv_heads, queries, q_per_kv, *x.shape[2:])
    return jnp.moveaxis(x, 1, 2).reshape(batch, queries, kv_heads * q_per_kv, *x.shape[4:])
