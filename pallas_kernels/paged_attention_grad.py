"""The gradient of paged attention, for every implementation: a block loop in XLA that recomputes the probabilities from lse.

With P = exp(score - lse), per query and key:  dP = dout . v,  dscore = P * (dP - dout . out + dlse).
Pages named by several rows add up; a slot nobody sees, and every dead table entry, gets exactly zero.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.key_blocks import Problem, Queries, first_rows, gather_block, group_queries, rows_of_heads, ungroup_queries
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_attention_xla import BLOCK_TOKENS, scores
from pallas_kernels.varying import fori_loop


def _scatter_add(total: jax.Array, rows: jax.Array, live: jax.Array, update: jax.Array, kv_heads: int) -> jax.Array:
    """Adds one block's update [batch * kv_heads, BLOCK_TOKENS, head_dim] to its rows; rows of dead blocks are dropped."""
    batch, _, per_block = rows.shape
    row_live = jnp.any(live.reshape(batch, kv_heads, per_block, -1), axis=-1)
    target = jnp.where(row_live, rows, total.shape[0]).reshape(-1)
    return total.at[target].add(update.reshape(target.shape[0], -1), mode="drop")


def _block_gradients(problem, options, where, grouped, block):
    """(dq of this block, dk and dv [n, tokens, head_dim], rows, live) with `grouped` = q, out, lse, dout, dlse by kv head."""
    q, delta, lse, dout, dlse = grouped
    kv_heads = problem.k_pages.shape[1]
    batch = problem.q.shape[0]
    blocks = jnp.full(batch, block)
    shape = problem.k_pages.shape
    found = first_rows(blocks, BLOCK_TOKENS, shape, problem.block_tables, lax.iota(jnp.int32, batch))
    rows = rows_of_heads(found, BLOCK_TOKENS, shape)
    seen = where.visible(blocks * BLOCK_TOKENS, BLOCK_TOKENS, problem.q.shape[1], kv_heads, problem.q.shape[2] // kv_heads)
    live = jnp.any(seen, axis=1)

    def load(pages, scales):
        gather = lambda x: gather_block(x, rows, BLOCK_TOKENS)
        x = gather(pages).astype(jnp.float32)
        x = x if scales is None else x * gather(scales)[:, :, None]
        return jnp.where(live[:, :, None], x, 0.0)

    k, v = load(problem.k_pages, problem.k_scales), load(problem.v_pages, problem.v_scales)
    product = lambda spec, a, b: jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)
    s = scores(q, k, None, options)
    p = jnp.where(seen, jnp.exp(s - lse[:, :, None]), 0.0)
    ds = p * (product("nmd,ntd->nmt", dout, v) - delta[:, :, None] + dlse[:, :, None])
    if options.logits_soft_cap is not None:
        ds = jnp.where(seen, ds * (1.0 - (s / options.logits_soft_cap) ** 2), 0.0)
    ds = ds * options.scale
    dk, dv = product("nmt,nmd->ntd", ds, q), product("nmt,nmd->ntd", p, dout)
    return product("nmt,ntd->nmd", ds, k), dk, dv, rows, live


def paged_attention_gradient(
    problem: Problem,
    options: AttentionOptions,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Cotangents of (q, k_pages, v_pages, sinks), in their dtypes; accumulated in float32.

    Args:
      problem, options: as the forward pass had them.
      results: out [batch, queries, heads, head_dim] and lse f32[batch, queries, heads] of the forward pass.
      cotangents: of out and lse.

    Returns:
      dq; dk_pages and dv_pages, None for quantized pages; dsinks, None without sinks.
    """
    batch, queries, heads, _ = problem.q.shape
    num_pages, kv_heads, page_size, head_dim = problem.k_pages.shape
    where = Queries.of(problem, options.sliding_window)
    alive = where.alive(queries)[:, :, None]
    f32 = lambda x: jnp.where(alive[..., None] if x.ndim == 4 else alive, x.astype(jnp.float32), 0.0)
    q, out, lse, dout, dlse = (f32(x) for x in (problem.q, *results, *cotangents))
    delta = jnp.sum(out * dout, axis=-1)
    grouped = tuple(group_queries(x, kv_heads) for x in (q, dout))
    flat = tuple(group_queries(x[..., None], kv_heads)[..., 0] for x in (delta, lse, dlse))
    quantized = problem.k_scales is not None
    row_tokens = math.gcd(page_size, BLOCK_TOKENS)
    pool_rows = num_pages * kv_heads * (page_size // row_tokens)
    pool = jnp.zeros((1, 1) if quantized else (pool_rows, row_tokens * head_dim), jnp.float32)

    def body(block, carry):
        dq, dk_pool, dv_pool = carry
        part = (grouped[0], flat[0], flat[1], grouped[1], flat[2])
        dq_block, dk, dv, rows, live = _block_gradients(problem, options, where, part, block)
        if not quantized:
            dk_pool = _scatter_add(dk_pool, rows, live, dk, kv_heads)
            dv_pool = _scatter_add(dv_pool, rows, live, dv, kv_heads)
        return dq + dq_block, dk_pool, dv_pool

    begin, end = where.blocks(BLOCK_TOKENS)
    held = begin < end
    first, behind = jnp.min(jnp.where(held, begin, jnp.iinfo(jnp.int32).max)), jnp.max(jnp.where(held, end, 0))
    dq, dk_pool, dv_pool = fori_loop(
        first, behind, body, (jnp.zeros_like(grouped[0]), pool, pool), problem, results, cotangents
    )
    dq = ungroup_queries(dq, batch, queries).astype(problem.q.dtype)
    dsinks = None
    if problem.sinks is not None:
        weight = jnp.where(alive, jnp.exp(problem.sinks.astype(jnp.float32)[None, None, :] - lse), 0.0)
        dsinks = jnp.sum(weight * (dlse - delta), axis=(0, 1)).astype(problem.sinks.dtype)
    if quantized:
        return dq, None, None, dsinks
    shape = problem.k_pages.shape
    cast = lambda x: x.reshape(shape).astype(problem.k_pages.dtype)
    return dq, cast(dk_pool), cast(dv_pool), dsinks
