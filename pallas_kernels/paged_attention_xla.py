"""Paged attention in plain XLA: the CPU's fast path, the fallback elsewhere, and the backward pass of every implementation.

Every row splits its keys at multiples of a block's tokens, absolute positions, whatever the other rows, its table or the page size. The
blocks that rows hold are scheduled first blocks first and within them the rows with most blocks first. A `while` loop takes so many of
them a turn, each as a softmax of its own, in float32, and merges them into their rows' results, the first blocks first:

    blocks held    row 5 |0|1|2|3|      the schedule    | 5.0  2.0  0.0 | 7.0  5.1  2.1 | 5.2  2.2  5.3 |
                   row 2 |0|1|2|                           first turn       second          third
                   row 0 |0|
                   row 7 |0|            (three blocks a turn here; merged one after the other: 7.0 and then 5.1, 2.1)

So a row's bits depend on its own tokens only, and the cost grows with the tokens held: not with the table's width, and not with the
longest row's length for every row. A turn is small enough for what it gathers to stay in the processor's cache until it is used.

A zero probability times a NaN left in a dead slot is NaN. Masking V costs a pass over it, so the product is first made
without, and made again with V masked only where the result is not finite; both products have the same bits otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.key_blocks import (
    BlockSchedule,
    Problem,
    Queries,
    gather_block,
    group_queries,
    order_of,
    rows_of_heads,
    take_rows,
    ungroup_queries,
)
from pallas_kernels.options import AttentionOptions

BLOCK_TOKENS = 64
LONG_BLOCK_TOKENS, MANY_QUERY_HEADS = 256, 256
"""Tokens of a block where so many query heads share a product, as in prefill: what is carried from block to block is then as large
as a block's keys, and fewer blocks pass it on less often (docs/measurements.md, "Keys per block for a prompt")."""

TURN_BYTES = 3 * 2**19
"""Most bytes of keys that one turn gathers: somewhat more than one core's L2 cache holds. A turn takes one block at least."""

MIN_PRODUCT_ROWS = 8
"""Query heads per product that deterministic mode aims for: with fewer, CPU products do not get faster."""

_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


def scores(q: jax.Array, k: jax.Array, k_scale: jax.Array | None, options: AttentionOptions) -> jax.Array:
    """f32[n, m, tokens] scaled and capped scores of q [n, m, head_dim] and k [n, tokens, head_dim].

    The longer operand stands on the left: XLA's CPU products repack all of the right one. The barrier keeps the transpose from
    being folded into the product, which would swap them back. In bfloat16 they repack neither, and keys on the right are faster
    (docs/measurements.md, "Operand order in attention").
    """
    k = k.astype(q.dtype)
    if q.shape[1] < k.shape[1] and q.dtype != jnp.bfloat16:
        s = lax.optimization_barrier(jnp.einsum("ntd,nmd->ntm", k, q, preferred_element_type=jnp.float32)).swapaxes(1, 2)
    else:
        s = jnp.einsum("nmd,ntd->nmt", q, k, preferred_element_type=jnp.float32)
    s = s * options.scale
    if k_scale is not None:
        s = s * k_scale[:, None, :]
    if options.logits_soft_cap is not None:
        s = options.logits_soft_cap * jnp.tanh(s / options.logits_soft_cap)
    return s


def weighted_values(p: jax.Array, v: jax.Array, seen: Callable[[], jax.Array]) -> jax.Array:
    """f32[n, m, head_dim] = p [n, m, tokens] @ v [n, tokens, head_dim], where NaN in tokens not `seen()` counts for nothing."""
    product = lambda values: jnp.einsum("nmt,ntd->nmd", p, values, preferred_element_type=jnp.float32)
    out = product(v)
    masked = lambda: product(jnp.where(jnp.any(seen(), axis=1)[:, :, None], v, jnp.zeros_like(v)))
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

    With XLA's own exponential of one number per query, the last bit of a row depended on how many rows its tile had
    (docs/measurements.md, "An exponential may depend on the number of rows"). The keys of a block are whole vectors, and were not affected.
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


def _attend_blocks(problem: Problem, options: AttentionOptions, q: jax.Array, part: BlockSchedule, block: int) -> tuple:
    """A part of the schedule as if there were no other blocks: the greatest score and the sum of exponentials f32[n, m], and values
    weighted by these f32[n, m, head_dim]; q [n, m, head_dim], with n = blocks * kv_heads."""
    _, kv_heads, _, _ = shape = problem.k_pages.shape
    q_per_kv = problem.q.shape[2] // kv_heads
    rows = rows_of_heads(part.first_rows, block, shape)
    gather = lambda pages: gather_block(pages, rows, block)
    seen = lambda: part.queries.visible(part.start, block, q.shape[1] // q_per_kv, kv_heads, q_per_kv)
    k_scale = None if problem.k_scales is None else gather(problem.k_scales)
    s = jnp.where(seen(), scores(q, gather(problem.k_pages), k_scale, options), -jnp.inf)
    top = jnp.maximum(jnp.max(s, axis=-1), _LOWEST)
    p = jnp.exp(s - top[:, :, None])
    total = tree_sum(p)
    if problem.v_scales is not None:
        p = jnp.where(seen(), p * gather(problem.v_scales)[:, None, :], 0.0)
    return top, total, weighted_values(p.astype(q.dtype), gather(problem.v_pages).astype(q.dtype), seen)


def _merged(old: tuple, new: tuple) -> tuple:
    """Two results of `_attend_blocks` as one."""
    (top, total, acc), (new_top, new_total, new_acc) = old, new
    highest = jnp.maximum(top, new_top)
    decay, new_decay = decay_of(top - highest), decay_of(new_top - highest)
    acc = acc * decay[..., None] + new_acc * new_decay[..., None]
    return highest, total * decay + new_total * new_decay, acc


def blocks_per_turn(rows: int, nbytes: int) -> int:
    """How many blocks of `nbytes` are computed together: more of them save turns, but stay empty where rows hold few
    (docs/measurements.md, "Blocks per turn")."""
    return max(1, min(TURN_BYTES // nbytes, 4 if rows <= 4 else 2 * rows))


def _attend_rows(
    problem: Problem, queries: Queries, owner: jax.Array, options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """All queries of each row of q as one product: (out in q.dtype, lse f32[rows, queries, heads]).

    `owner` i32[rows] is each row's row of the block tables, which several rows may share.
    """
    count, width, heads, head_dim = problem.q.shape
    kv_heads = problem.k_pages.shape[1]
    m = width * heads // kv_heads
    block = LONG_BLOCK_TOKENS if not options.deterministic and m >= MANY_QUERY_HEADS else BLOCK_TOKENS
    turn = blocks_per_turn(count, kv_heads * head_dim * max(block * problem.k_pages.dtype.itemsize, m * 4))
    q = group_queries(problem.q, kv_heads).reshape(count, kv_heads, m, head_dim)
    schedule = BlockSchedule.of(problem, queries, owner, block, turn)
    place = lax.iota(jnp.int32, turn)

    def take_turn(state):
        """The blocks from place `at` on."""
        at, carry = state
        part = schedule.part(at, turn)
        parts = _attend_blocks(problem, options, take_rows(q, part.row).reshape(turn * kv_heads, m, head_dim), part, block)
        parts = tuple(x.reshape(turn, kv_heads, *x.shape[1:]) for x in parts)

        def merge(state):
            """One level's blocks, which belong to rows next to each other; the carry has room for the others beside them."""
            level, carry = state
            use = (at + place >= schedule.before[level]) & (at + place < schedule.before[level + 1])
            window = turn + at - schedule.before[level]
            old = tuple(lax.dynamic_slice_in_dim(x, window, turn) for x in carry)
            new = (jnp.where(jnp.expand_dims(use, range(1, x.ndim)), y, x) for x, y in zip(old, _merged(old, parts)))
            return level + 1, tuple(lax.dynamic_update_slice_in_dim(x, y, window, 0) for x, y in zip(carry, new))

        last = jnp.minimum(at + turn, schedule.before[-1])
        _, carry = lax.while_loop(lambda state: schedule.before[state[0]] < last, merge, (part.level[0], carry))
        return at + turn, carry

    shape = (count + 2 * turn, kv_heads, m)
    start = (jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32))
    _, (top, total, acc) = lax.while_loop(lambda state: state[0] < schedule.before[-1], take_turn, (jnp.int32(0), start))
    back = turn + order_of(schedule.order)
    acc = take_rows(acc, back).reshape(count, kv_heads, m, head_dim)
    results = (ungroup_queries(x.reshape(count * kv_heads, *x.shape[2:]), count, width) for x in (top[back], total[back], acc))
    return _finish(problem, queries.alive(width), *results)


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
    # Behind a barrier, because jaxlib 0.10.2 miscompiles the loops of a single row whose length is a constant: it ran none of them.
    lengths, num_queries = lax.optimization_barrier((problem.lengths, problem.num_queries))
    problem = problem._replace(lengths=lengths, num_queries=num_queries)
    batch, queries, heads, head_dim = problem.q.shape
    width = query_tile(queries, heads // problem.k_pages.shape[1], options.deterministic)
    tiles = -(-queries // width)
    q = jnp.pad(problem.q, ((0, 0), (0, tiles * width - queries), (0, 0), (0, 0))).reshape(
        batch * tiles, width, heads, head_dim
    )
    owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), tiles)
    where = Queries.of(problem, options.sliding_window).tiles(width, tiles)
    parts = _attend_rows(problem._replace(q=q), where, owner, options)
    out, lse = (x.reshape(batch, tiles * width, *x.shape[2:])[:, :queries] for x in parts)
    return out, lse
