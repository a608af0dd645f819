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


class Geometry(NamedTuple):
    """Per row and query: what each may see.

    Attributes:
      last: i32[batch, queries] own position of each query, -1 where it is dead.
      first: i32[batch, queries] the earliest position it sees.
    """

    last: jax.Array
    first: jax.Array

    def blocks(self, block: int) -> tuple[jax.Array, jax.Array]:
        """i32[batch] twice: the half-open range of blocks that any of a row's queries needs; empty for a dead row."""
        end = (jnp.max(self.last, axis=1) + block) // block
        first = jnp.where(self.last >= 0, self.first, jnp.iinfo(jnp.int32).max)
        return jnp.minimum(jnp.min(first, axis=1) // block, end), end


def geometry(queries: int, lengths: jax.Array, num_queries: jax.Array, window: int | None, max_tokens: int) -> Geometry:
    """Positions of the queries `[batch, queries]`; lengths above `max_tokens` are cut to it."""
    lengths = jnp.clip(lengths, 0, max_tokens)
    index = lax.broadcasted_iota(jnp.int32, (lengths.shape[0], queries), 1)
    own = lengths[:, None] - num_queries[:, None] + index
    last = jnp.where((index < num_queries[:, None]) & (own >= 0) & (own < lengths[:, None]), own, -1)
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - (window - 1), 0)
    return Geometry(last, first)


def row_indices(blocks: jax.Array, block: int, shape: tuple[int, ...], block_tables: jax.Array, owner: jax.Array) -> jax.Array:
    """Rows of the 2-D view of a pool of `shape` that hold the tokens of block `blocks[i]`, i32[n], of row `owner[i]` of the tables:
    i32[n, kv_heads, rows per block].

    Table entries that are out of range are clamped, and so is the position behind the table's last page: what is read there
    is masked later.
    """
    num_pages, kv_heads, page_size, _ = shape
    row_tokens = math.gcd(page_size, block)
    start = blocks[:, None] * block + (lax.iota(jnp.int32, block // row_tokens) * row_tokens)[None, :]
    column = jnp.clip(start // page_size, 0, block_tables.shape[1] - 1)
    page = jnp.clip(block_tables.at[owner[:, None], column].get(mode="promise_in_bounds"), 0, num_pages - 1)
    head = lax.iota(jnp.int32, kv_heads)
    sub = (start % page_size) // row_tokens
    rows_per_page = page_size // row_tokens
    return (page[:, None, :] * kv_heads + head[None, :, None]) * rows_per_page + sub[:, None, :]


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x[rows] as [len(rows), the rest of a row], as a plain memory copy on CPU too.

    The gather stands in a branch that is always taken. Outside of one, XLA on CPU fuses it with the reshape behind it and the
    arithmetic of `rows` before it, and then copies number by number, at half the speed.

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

    return lax.cond(rows[0] >= 0, gather, lambda x, rows: jnp.zeros((rows.shape[0], width), dtype), x, rows)


def gather_block(pages: jax.Array, rows: jax.Array, block: int) -> jax.Array:
    """One block of a pool: [num_pages, kv_heads, page_size, *features] -> [batch * kv_heads, block, *features]."""
    batch, kv_heads, _ = rows.shape
    row_tokens = math.gcd(pages.shape[2], block)
    features = pages.shape[3:]
    taken = take_rows(pages.reshape(-1, row_tokens * math.prod(features)), rows.reshape(-1))
    return taken.reshape(batch * kv_heads, block, *features)


def visible(blocks: jax.Array, block: int, geo: Geometry, kv_heads: int, q_per_kv: int) -> jax.Array:
    """bool[batch * kv_heads, queries * q_per_kv, block]: which keys of each row's block each query sees."""
    batch, queries = geo.last.shape
    position = blocks[:, None, None] * block + lax.iota(jnp.int32, block)[None, None, :]
    seen = (position <= geo.last[:, :, None]) & (position >= geo.first[:, :, None])
    shape = (batch, kv_heads, queries, q_per_kv, block)
    return lax.broadcast_in_dim(seen, shape, (0, 2, 4)).reshape(batch * kv_heads, queries * q_per_kv, block)


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
