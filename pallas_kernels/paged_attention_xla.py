"""Paged attention in plain XLA: the CPU's fast path, the fallback elsewhere, and the backward pass of every implementation.

One `while` loop runs over blocks of `BLOCK_TOKENS` absolute token positions, from the first block any row needs to the last
one, with an online softmax in float32:

    position   0         128        256        384
    block      |----0----|----1----|----2----|        every row splits here, whatever its mates, table or page size
    row of 150 |xxxxxxxxx|xx.......|                  block 2 adds exactly nothing to this row

So the cost grows with the tokens held and not with the table's width, and a row's bits depend on its own tokens only.

Pages are gathered as 2-D rows of `gcd(page_size, BLOCK_TOKENS)` tokens (a view of the pool, never a copy): this form of the
gather is a plain memory copy on CPU, and it keeps the split positions for any page size, odd ones included.

A zero probability times a NaN left in a dead slot is NaN. Masking V costs a pass over it, so the product is first made
without, and made again with V masked only where the result is not finite; both products have the same bits otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions

BLOCK_TOKENS = 128
QUERY_TILE = 8
_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


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
    """Per row and query: what each may see, and which blocks any of them needs.

    Attributes:
      last: i32[batch, queries] own position of each query, -1 where it is dead.
      first: i32[batch, queries] the earliest position it sees.
      begin, end: i32[] the half-open range of blocks.
    """

    last: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array


def geometry(queries: int, lengths: jax.Array, num_queries: jax.Array, window: int | None, max_tokens: int) -> Geometry:
    """Positions of the queries `[batch, queries]` and the range of blocks; lengths above `max_tokens` are cut to it."""
    lengths = jnp.clip(lengths, 0, max_tokens)
    index = lax.broadcasted_iota(jnp.int32, (lengths.shape[0], queries), 1)
    own = lengths[:, None] - num_queries[:, None] + index
    last = jnp.where((index < num_queries[:, None]) & (own >= 0) & (own < lengths[:, None]), own, -1)
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - (window - 1), 0)
    end = (jnp.max(last) + BLOCK_TOKENS) // BLOCK_TOKENS
    begin = jnp.minimum(jnp.min(jnp.where(last >= 0, first, max_tokens)) // BLOCK_TOKENS, end)
    return Geometry(last, first, begin, end)


def row_indices(block: jax.Array, shape: tuple[int, ...], block_tables: jax.Array) -> jax.Array:
    """Rows of the 2-D view of a pool of `shape` that hold one block: i32[batch, kv_heads, rows per block].

    Table entries that are out of range are clamped, and so is the position behind the table's last page: what is read there
    is masked later.
    """
    num_pages, kv_heads, page_size, _ = shape
    row_tokens = math.gcd(page_size, BLOCK_TOKENS)
    start = block * BLOCK_TOKENS + lax.iota(jnp.int32, BLOCK_TOKENS // row_tokens) * row_tokens
    column = jnp.minimum(start // page_size, block_tables.shape[1] - 1)
    page = jnp.clip(block_tables.at[:, column].get(mode="promise_in_bounds"), 0, num_pages - 1)
    head = lax.iota(jnp.int32, kv_heads)
    sub = (start % page_size) // row_tokens
    rows_per_page = page_size // row_tokens
    return (page[:, None, :] * kv_heads + head[None, :, None]) * rows_per_page + sub[None, None, :]


def gather_block(pages: jax.Array, rows: jax.Array) -> jax.Array:
    """One block of a pool: [num_pages, kv_heads, page_size, *features] -> [batch * kv_heads, BLOCK_TOKENS, *features].

    Narrow floats travel as integers: XLA on CPU turns a gather of bfloat16 into one of float32, and so converts the whole
    pool at every call. The barrier keeps that change of type inside the loop, where it costs nothing; hoisted out of the
    loop it would be a copy of the pool again.
    """
    batch, kv_heads, _ = rows.shape
    row_tokens = math.gcd(pages.shape[2], BLOCK_TOKENS)
    features = pages.shape[3:]
    dtype = jnp.dtype(pages.dtype)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype)
    pages, rows = lax.optimization_barrier((pages, rows))
    view = lax.bitcast_convert_type(pages, bits).reshape(-1, row_tokens * math.prod(features))
    taken = lax.optimization_barrier(view.at[rows.reshape(-1)].get(mode="promise_in_bounds"))
    return lax.bitcast_convert_type(taken, dtype).reshape(batch * kv_heads, BLOCK_TOKENS, *features)


def scores(q: jax.Array, k: jax.Array, k_scale: jax.Array | None, options: AttentionOptions) -> jax.Array:
    """f32[n, m, tokens] scaled and capped scores of q [n, m, head_dim] and k [n, tokens, head_dim]."""
    s = jnp.einsum("nmd,ntd->nmt", q, k.astype(q.dtype), preferred_element_type=jnp.float32) * options.scale
    if k_scale is not None:
        s = s * k_scale[:, None, :]
    if options.logits_soft_cap is not None:
        s = options.logits_soft_cap * jnp.tanh(s / options.logits_soft_cap)
    return s


def visible(block: jax.Array, geo: Geometry, kv_heads: int, q_per_kv: int) -> jax.Array:
    """bool[batch * kv_heads, queries * q_per_kv, BLOCK_TOKENS]: which keys of a block each query sees."""
    batch, queries = geo.last.shape
    position = block * BLOCK_TOKENS + lax.iota(jnp.int32, BLOCK_TOKENS)
    position = position[None, None, :]
    seen = (position <= geo.last[:, :, None]) & (position >= geo.first[:, :, None])
    shape = (batch, kv_heads, queries, q_per_kv, BLOCK_TOKENS)
    return lax.broadcast_in_dim(seen, shape, (0, 2, 4)).reshape(batch * kv_heads, queries * q_per_kv, BLOCK_TOKENS)


def weighted_values(p: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """f32[n, m, head_dim] = p [n, m, tokens] @ v [n, tokens, head_dim], where NaN in unseen tokens counts for nothing."""
    product = lambda values: jnp.einsum("nmt,ntd->nmd", p, values, preferred_element_type=jnp.float32)
    out = product(v)
    masked = lambda: product(jnp.where(jnp.any(seen, axis=1)[:, :, None], v, jnp.zeros_like(v)))
    return lax.cond(jnp.all(jnp.isfinite(out)), lambda: out, masked)


def tree_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis (a power of two) by halving: `jnp.sum` cuts long inputs among threads, and then its bits
    depend on how many rows there are."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


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


def _attend_tile(problem: Problem, geo: Geometry, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """All queries of `problem` at once: (out in q.dtype, lse f32[batch, queries, heads])."""
    q, k_pages, v_pages = problem.q, problem.k_pages, problem.v_pages
    batch, queries, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    grouped = group_queries(q, kv_heads)
    low = q.dtype
    n, m = grouped.shape[:2]

    def body(block, carry):
        top, total, acc = carry
        rows = row_indices(block, k_pages.shape, problem.block_tables)
        seen = visible(block, geo, kv_heads, heads // kv_heads)
        k_scale = None if problem.k_scales is None else gather_block(problem.k_scales, rows)
        s = jnp.where(seen, scores(grouped, gather_block(k_pages, rows), k_scale, options), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        p = jnp.exp(s - new_top[:, :, None])
        decay = jnp.exp(top - new_top)
        total = total * decay + tree_sum(p)
        if problem.v_scales is not None:
            p = jnp.where(seen, p * gather_block(problem.v_scales, rows)[:, None, :], 0.0)
        pv = weighted_values(p.astype(low), gather_block(v_pages, rows).astype(low), seen)
        return new_top, total, acc * decay[:, :, None] + pv

    start = (jnp.full((n, m), _LOWEST, jnp.float32), jnp.zeros((n, m), jnp.float32), jnp.zeros((n, m, head_dim), jnp.float32))
    top, total, acc = (ungroup_queries(x, batch, queries) for x in lax.fori_loop(geo.begin, geo.end, body, start))
    alive = (geo.last >= 0)[:, :, None]
    if problem.sinks is not None:
        sinks = problem.sinks.astype(jnp.float32)[None, None, :]
        new_top = jnp.maximum(top, sinks)
        decay = jnp.exp(top - new_top)
        top, total, acc = new_top, total * decay + jnp.exp(sinks - new_top), acc * decay[..., None]
    total = jnp.where(alive, total, 1.0)
    out = jnp.where(alive[..., None], acc / total[..., None], 0.0).astype(q.dtype)
    return out, jnp.where(alive, top + jnp.log(total), -jnp.inf)


def paged_attention_xla(
    problem: Problem, options: AttentionOptions, *, query_tile: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its pages.

    Args:
      problem: checked by the public operation; see `pallas_kernels.paged_attention`.
      options: static options.
      query_tile: queries run in tiles of exactly this many (the last one padded), so that a query's bits do not depend on
        how many queries its row has; None runs them all at once.

    Returns:
      out [batch, queries, heads, head_dim] in q.dtype and lse f32[batch, queries, heads].
    """
    kv_heads, page_size = problem.k_pages.shape[1:3]
    batch, queries, heads, head_dim = problem.q.shape
    max_tokens = problem.block_tables.shape[1] * page_size
    positions = lambda count: geometry(count, problem.lengths, problem.num_queries, options.sliding_window, max_tokens)
    if query_tile is None and queries * heads == kv_heads:
        query_tile = 2  # a product with a vector becomes a sum that is cut among threads by the number of rows
    if query_tile is None:
        return _attend_tile(problem, positions(queries), options)
    tiles = -(-queries // query_tile)
    padded = jnp.pad(problem.q, ((0, 0), (0, tiles * query_tile - queries), (0, 0), (0, 0)))
    geo = positions(tiles * query_tile)

    def one_tile(index):
        part = lambda x: lax.dynamic_slice_in_dim(x, index * query_tile, query_tile, axis=1)
        last, first = part(geo.last), part(geo.first)
        end = (jnp.max(last) + BLOCK_TOKENS) // BLOCK_TOKENS
        begin = jnp.minimum(jnp.min(jnp.where(last >= 0, first, max_tokens)) // BLOCK_TOKENS, end)
        return _attend_tile(problem._replace(q=part(padded)), Geometry(last, first, begin, end), options)

    if tiles == 1:
        out, lse = one_tile(0)
    else:
        out, lse = lax.map(one_tile, lax.iota(jnp.int32, tiles))
        out = jnp.moveaxis(out, 0, 1).reshape(batch, tiles * query_tile, heads, head_dim)
        lse = jnp.moveaxis(lse, 0, 1).reshape(batch, tiles * query_tile, heads)
    return out[:, :queries], lse[:, :queries]
