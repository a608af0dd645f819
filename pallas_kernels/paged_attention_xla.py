"""Paged attention in plain XLA: the CPU's fast path, the fallback elsewhere, and the backward pass of every implementation.

Every row splits its keys at multiples of a block's tokens, absolute positions, whatever its mates, table or page size, and combines
its blocks in order by an online softmax in float32; so a row's bits depend on its own tokens only. One `while` loop runs over
tiles of rows that still have a block, longest rows first:

    blocks held    row 5 |0|1|2|3|      turn 1: block 0 of rows 5, 2     turn 3: block 1 of rows 5, 2     turn 4: block 2 of 5, 2
                   row 2 |0|1|2|        turn 2: block 0 of rows 0, 7     (row 0 has none, row 7 neither)  turn 5: block 3 of 5
                   row 0 |0|
                   row 7 |0|            (tiles of two rows here)

So the cost grows with the tokens held: not with the table's width, and not with the longest row's length for every row. Tiles are
small enough for what they gather to stay in the processor's cache until it is used.

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

from pallas_kernels import options as opts
from pallas_kernels.options import AttentionOptions

BLOCK_TOKENS = 64
LONG_BLOCK_TOKENS, MANY_QUERY_HEADS = 256, 256
"""Tokens of a block where so many query heads share a product, as in prefill: what is carried from block to block is then as large
as a block's keys, and fewer blocks pass it on less often (a prompt of 1,024 tokens: 0.87 s instead of 1.04)."""

TILE_BYTES = 2**20
"""Keys that one turn gathers, at most: about what one core's L2 cache holds. At least one row."""

MIN_PRODUCT_ROWS = 8
"""Query heads per product that deterministic mode aims for: with fewer, CPU products do not get faster."""

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
    """x[rows] of a 2-D array, as a plain memory copy on CPU too.

    The gather stands in a branch that is always taken. Outside of one, XLA on CPU fuses it with the reshape behind it and the
    arithmetic of `rows` before it, and then copies number by number, at half the speed.

    Narrow floats travel as integers: XLA on CPU turns a gather of bfloat16 into one of float32, and so converts the whole
    array at every call. The barrier keeps that change of type inside a loop around it, where it costs nothing; hoisted out of the
    loop it would be a copy of the array again.
    """
    dtype = jnp.dtype(x.dtype)
    bits = opts.bits_of(dtype)
    x, rows = lax.optimization_barrier((x, rows))

    def gather(x: jax.Array, rows: jax.Array) -> jax.Array:
        taken = lax.bitcast_convert_type(x, bits).at[rows].get(mode="promise_in_bounds")
        return lax.bitcast_convert_type(taken, dtype)

    return lax.cond(rows[0] >= 0, gather, lambda x, rows: jnp.zeros((rows.shape[0], x.shape[1]), dtype), x, rows)


def gather_block(pages: jax.Array, rows: jax.Array, block: int) -> jax.Array:
    """One block of a pool: [num_pages, kv_heads, page_size, *features] -> [batch * kv_heads, block, *features]."""
    batch, kv_heads, _ = rows.shape
    row_tokens = math.gcd(pages.shape[2], block)
    features = pages.shape[3:]
    taken = take_rows(pages.reshape(-1, row_tokens * math.prod(features)), rows.reshape(-1))
    return taken.reshape(batch * kv_heads, block, *features)


def scores(q: jax.Array, k: jax.Array, k_scale: jax.Array | None, options: AttentionOptions) -> jax.Array:
    """f32[n, m, tokens] scaled and capped scores of q [n, m, head_dim] and k [n, tokens, head_dim].

    The longer operand stands on the left: XLA's CPU products repack all of the right one. The barrier keeps the transpose from
    being folded into the product, which would swap them back.
    """
    k = k.astype(q.dtype)
    if q.shape[1] < k.shape[1]:
        s = lax.optimization_barrier(jnp.einsum("ntd,nmd->ntm", k, q, preferred_element_type=jnp.float32)).swapaxes(1, 2)
    else:
        s = jnp.einsum("nmd,ntd->nmt", q, k, preferred_element_type=jnp.float32)
    s = s * options.scale
    if k_scale is not None:
        s = s * k_scale[:, None, :]
    if options.logits_soft_cap is not None:
        s = options.logits_soft_cap * jnp.tanh(s / options.logits_soft_cap)
    return s


def visible(blocks: jax.Array, block: int, geo: Geometry, kv_heads: int, q_per_kv: int) -> jax.Array:
    """bool[batch * kv_heads, queries * q_per_kv, block]: which keys of each row's block each query sees."""
    batch, queries = geo.last.shape
    position = blocks[:, None, None] * block + lax.iota(jnp.int32, block)[None, None, :]
    seen = (position <= geo.last[:, :, None]) & (position >= geo.first[:, :, None])
    shape = (batch, kv_heads, queries, q_per_kv, block)
    return lax.broadcast_in_dim(seen, shape, (0, 2, 4)).reshape(batch * kv_heads, queries * q_per_kv, block)


def weighted_values(p: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """f32[n, m, head_dim] = p [n, m, tokens] @ v [n, tokens, head_dim], where NaN in unseen tokens counts for nothing."""
    product = lambda values: jnp.einsum("nmt,ntd->nmd", p, values, preferred_element_type=jnp.float32)
    out = product(v)
    masked = lambda: product(jnp.where(jnp.any(seen, axis=1)[:, :, None], v, jnp.zeros_like(v)))
    # The sum is a fast way to ask whether all are finite; should it overflow, nothing is lost but time.
    return lax.cond(jnp.isfinite(jnp.sum(out)), lambda: out, masked)


def tree_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis (a power of two) by halving: `jnp.sum` cuts long inputs among threads, and then its bits
    depend on how many rows there are."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def decay_of(x: jax.Array) -> jax.Array:
    """exp of differences that are never positive, in plain arithmetic: exactly 1 at 0, within 2e-7 of exp, above -87.

    With XLA's own exponential the last bit of a row depended on how many rows its tile had (jaxlib 0.12, a few numbers in ten
    thousand). The keys of a block fill whole vectors; one number per query does not.
    Source: the reduction and polynomial of Cephes' expf.
    """
    x = jnp.maximum(x, -87.0)
    k = jnp.round(x * 1.44269504)
    r = (x - k * 0.693359375) + k * 2.12194440e-4
    y = jnp.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + c
    scale = lax.bitcast_convert_type((k.astype(jnp.int32) + 127) << 23, jnp.float32)
    return (y * (r * r) + r + 1.0) * scale


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


def _attend_block(problem: Problem, options: AttentionOptions, q: jax.Array, rows: jax.Array, seen: jax.Array, carry: tuple):
    """One block of each row into the online softmax; carry = (top, total [n, m], acc [n, m, head_dim]) with n = rows * kv_heads."""
    top, total, acc = carry
    gather = lambda pages: gather_block(pages, rows, seen.shape[2])
    k_scale = None if problem.k_scales is None else gather(problem.k_scales)
    s = jnp.where(seen, scores(q, gather(problem.k_pages), k_scale, options), -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(s, axis=-1))
    p = jnp.exp(s - new_top[:, :, None])
    decay = decay_of(top - new_top)
    total = total * decay + tree_sum(p)
    if problem.v_scales is not None:
        p = jnp.where(seen, p * gather(problem.v_scales)[:, None, :], 0.0)
    pv = weighted_values(p.astype(q.dtype), gather(problem.v_pages).astype(q.dtype), seen)
    return new_top, total, acc * decay[:, :, None] + pv


def _attend_rows(problem: Problem, geo: Geometry, owner: jax.Array, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """All queries of each row of q as one product: (out in q.dtype, lse f32[rows, queries, heads]).

    `owner` i32[rows] is each row's line of the block tables, which several rows may share.
    """
    count, queries, heads, head_dim = problem.q.shape
    kv_heads = problem.k_pages.shape[1]
    many = not options.deterministic and queries * heads // kv_heads >= MANY_QUERY_HEADS
    block = LONG_BLOCK_TOKENS if many else BLOCK_TOKENS
    most = max(1, TILE_BYTES // (kv_heads * block * head_dim * problem.k_pages.dtype.itemsize))
    tiles = -(-count // most)
    tile = -(-count // tiles)
    padded = tiles * tile
    begin, end = geo.blocks(block)
    order = None if tiles == 1 else jnp.argsort(begin - end)
    pad = lambda x, dead: jnp.pad(x, [(0, padded - count)] + [(0, 0)] * (x.ndim - 1), constant_values=dead)
    permuted = lambda x, by: take_rows(x.reshape(x.shape[0], -1), by).reshape(by.shape[0], *x.shape[1:])
    line = lambda x, dead: x if order is None else pad(x[order], dead)
    held, begin, owner = line(end - begin, 0), line(begin, 0), line(owner, 0)
    geo = Geometry(line(geo.last, -1), line(geo.first, 0))
    q = group_queries(problem.q, kv_heads).reshape(count, kv_heads, -1, head_dim)
    q = q if order is None else pad(permuted(q, order), 0)
    shape = (padded, kv_heads, q.shape[2])

    def turn(state):
        level, at, carry = state
        part = lambda x: lax.dynamic_slice_in_dim(x, at, tile)
        flat = lambda x: part(x).reshape(tile * kv_heads, *x.shape[2:])
        blocks = part(begin) + level
        rows = row_indices(blocks, block, problem.k_pages.shape, problem.block_tables, part(owner))
        seen = visible(blocks, block, Geometry(part(geo.last), part(geo.first)), kv_heads, heads // kv_heads)
        new = _attend_block(problem, options, flat(q), rows, seen, tuple(map(flat, carry)))
        put = lambda old, x: lax.dynamic_update_slice_in_dim(old, x.reshape(tile, *old.shape[1:]), at, 0)
        more = at + tile < jnp.sum(held > level)
        return jnp.where(more, level, level + 1), jnp.where(more, at + tile, 0), tuple(map(put, carry, new))

    start = (jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32))
    zero = jnp.int32(0)
    *_, (top, total, acc) = lax.while_loop(lambda state: state[0] < jnp.max(held), turn, (zero, zero, start))
    alive = geo.last >= 0
    if order is not None:
        back = jnp.zeros(count, jnp.int32).at[order].set(lax.iota(jnp.int32, count))
        top, total, acc, alive = top[back], total[back], permuted(acc, back), alive[back]
    carry = (ungroup_queries(x.reshape(count * kv_heads, *x.shape[2:]), count, queries) for x in (top, total, acc))
    return _finish(problem, alive, *carry)


def _finish(
    problem: Problem, alive: jax.Array, top: jax.Array, total: jax.Array, acc: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the sinks and normalises; top and total f32[rows, queries, heads]; dead queries get 0 and -inf."""
    alive = alive[:, :, None]
    if problem.sinks is not None:
        sinks = problem.sinks.astype(jnp.float32)[None, None, :]
        new_top = jnp.maximum(top, sinks)
        decay = decay_of(top - new_top)
        top, total, acc = new_top, total * decay + decay_of(sinks - new_top), acc * decay[..., None]
    total = jnp.where(alive, total, 1.0)
    out = jnp.where(alive[..., None], acc / total[..., None], 0.0).astype(problem.q.dtype)
    return out, jnp.where(alive, top + jnp.log(total), -jnp.inf)


def query_tile(queries: int, q_per_kv: int, deterministic: bool) -> int:
    """How many queries share one product.

    In deterministic mode always the same number, so that a query's bits do not depend on how many queries its row has. Else all
    of them; but never a product with a single vector: it becomes a sum that is cut among threads by the number of rows.
    """
    if deterministic:
        return max(1, MIN_PRODUCT_ROWS // q_per_kv)
    return 2 if queries * q_per_kv == 1 else queries


def paged_attention_xla(problem: Problem, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its pages.

    Args:
      problem: checked by the public operation; see `pallas_kernels.paged_attention`.
      options: static options.

    Returns:
      out [batch, queries, heads, head_dim] in q.dtype and lse f32[batch, queries, heads].
    """
    kv_heads, page_size = problem.k_pages.shape[1:3]
    batch, queries, heads, head_dim = problem.q.shape
    width = query_tile(queries, heads // kv_heads, options.deterministic)
    tiles = -(-queries // width)
    max_tokens = problem.block_tables.shape[1] * page_size
    geo = geometry(tiles * width, problem.lengths, problem.num_queries, options.sliding_window, max_tokens)
    q = jnp.pad(problem.q, ((0, 0), (0, tiles * width - queries), (0, 0), (0, 0)))
    cut = lambda x: x.reshape(batch * tiles, width, *x.shape[2:])
    owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles)
    parts = _attend_rows(problem._replace(q=cut(q)), Geometry(*map(cut, geo)), owner, options)
    out, lse = (x.reshape(batch, tiles * width, *x.shape[2:])[:, :queries] for x in parts)
    return out, lse
