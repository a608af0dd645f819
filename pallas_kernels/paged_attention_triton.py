"""Paged attention for NVIDIA GPUs from sm_80 on, in Pallas's Triton backend (jax 0.10.2 to 0.12; deprecated there since 0.11).

`launch` says what one program takes: a tile of query heads and a split of the keys. It writes a normalised partial result and its lse in
float32. A second kernel merges the live splits of each tile in order and adds the sinks, so a row's bits depend neither on the other rows
nor on the table's width.

Pages are loaded as rows of `gcd(page_size, block_tokens)` tokens, a whole page where it fits the block and a part of one where
it does not. Only live tokens inside the window of some query of the tile are loaded; the others read as 0, so that no NaN
enters. Features are padded to a power of two in registers only.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.config import KernelConfig
from pallas_kernels.key_blocks import Problem
from pallas_kernels.launch import Launch, block_range, make_launch, tile_positions, ungroup
from pallas_kernels.options import AttentionOptions

_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)
_LOG2E = math.log2(math.e)


def _row_numbers(launch: Launch, tables_ref, row, head, position, live):
    """Rows of the pool seen as [rows, row_tokens, head_dim] that hold the tokens at `position` (any shape)."""
    column = jnp.minimum(position // launch.page_size, launch.pages_per_seq - 1)
    page = plgpu.load(tables_ref.at[jnp.full_like(column, row), column], mask=live, other=0)
    page = jnp.clip(page, 0, launch.num_pages - 1)
    per_page = launch.page_size // launch.row_tokens
    return (page * launch.kv_heads + head) * per_page + (position % launch.page_size) // launch.row_tokens


def _load_features(ref, rows, token, live, launch: Launch) -> jax.Array:
    """[block_tokens, padded_dim] of a pool seen as [rows, row_tokens, head_dim]; dead tokens and padding are 0."""
    shape = (*live.shape, launch.padded_dim)
    feature = lax.broadcasted_iota(jnp.int32, shape, 2)
    mask = lax.broadcast_in_dim(live, shape, (0, 1))
    if launch.padded_dim != launch.head_dim:
        mask = mask & (feature < launch.head_dim)
    index = (lax.broadcast_in_dim(rows, shape, (0,)), lax.broadcast_in_dim(token, shape, (1,)), feature)
    zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    values = plgpu.load(ref.at[index], mask=mask, other=zero)
    return values.reshape(launch.config.block_tokens, launch.padded_dim)


def _load_scales(ref, rows, token, live, launch: Launch) -> jax.Array:
    """f32[block_tokens] of scales seen as [rows, row_tokens]; dead tokens are 0."""
    index = (lax.broadcast_in_dim(rows, live.shape, (0,)), lax.broadcast_in_dim(token, live.shape, (1,)))
    return plgpu.load(ref.at[index], mask=live, other=0.0).reshape(launch.config.block_tokens)


def _dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """f32 product over a's last axis. Float32 inputs are multiplied as float32, not on tensor cores: one tf32 product is good
    to 1e-3 only, and three of them take over 128 registers."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _block_step(launch: Launch, refs, q, place, positions, block, carry):
    """One block of keys: the online softmax of the tile, carry = (top, total, acc) in float32, base 2."""
    k_ref, v_ref, tables_ref, k_scales_ref, v_scales_ref = refs
    row, head = place
    last, first, lo, hi = positions
    top, total, acc = carry
    block_tokens, row_tokens = launch.config.block_tokens, launch.row_tokens
    start = block * block_tokens + lax.iota(jnp.int32, block_tokens // row_tokens) * row_tokens
    rows = _row_numbers(launch, tables_ref, row, head, start, start < hi)
    token = lax.iota(jnp.int32, row_tokens)
    each = lax.broadcast_in_dim(start, (block_tokens // row_tokens, row_tokens), (0,)) + lax.broadcasted_iota(
        jnp.int32, (block_tokens // row_tokens, row_tokens), 1
    )
    live = (each >= lo) & (each < hi)
    k = _load_features(k_ref, rows, token, live, launch).astype(q.dtype)
    s = _dot(q, k, 1) * launch.options.scale
    if k_scales_ref is not None:
        s = s * _load_scales(k_scales_ref, rows, token, live, launch)[None, :]
    cap = launch.options.logits_soft_cap
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    position = (block * block_tokens + lax.iota(jnp.int32, block_tokens))[None, :]
    seen = (position <= last[:, None]) & (position >= first[:, None])
    s = jnp.where(seen, s * _LOG2E, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(s, axis=1))
    p = jnp.exp2(s - new_top[:, None])
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.sum(p, axis=1)
    if v_scales_ref is not None:
        p = p * _load_scales(v_scales_ref, rows, token, live, launch)[None, :]
    v = _load_features(v_ref, rows, token, live, launch).astype(q.dtype)
    return new_top, total, acc * decay[:, None] + _dot(p.astype(q.dtype), v, 0)


def _attend_kernel(q_ref, k_ref, v_ref, tables_ref, lengths_ref, num_queries_ref, *rest, launch: Launch):
    """Writes one split's normalised result f32[tile_rows, padded_dim] and lse f32[tile_rows] (natural log)."""
    k_scales_ref, v_scales_ref, out_ref, lse_ref = rest if len(rest) == 4 else (None, None, *rest)
    row_tile, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, tile = row_tile // launch.tiles, row_tile % launch.tiles
    length = jnp.clip(lengths_ref[row], 0, launch.pages_per_seq * launch.page_size)
    query, group, last, first, lo, hi = tile_positions(launch, tile, length, num_queries_ref[row])
    shape = (launch.config.tile_rows, launch.padded_dim)
    feature = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = lambda x: lax.broadcast_in_dim(x, shape, (0,))
    index = (jnp.full(shape, row), spread(query), spread(head * launch.q_per_kv + group), feature)
    q = plgpu.load(q_ref.at[index], mask=spread(query < launch.queries) & (feature < launch.head_dim), other=0)
    begin, end = block_range(launch, split, lo, hi)

    @pl.when(begin < end)
    def _():
        refs = (k_ref, v_ref, tables_ref, k_scales_ref, v_scales_ref)
        step = functools.partial(_block_step, launch, refs, q, (row, head), (last, first, lo, hi))
        start = (
            jnp.full(shape[:1], _LOWEST, jnp.float32),
            jnp.zeros(shape[:1], jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
        top, total, acc = lax.fori_loop(begin, end, step, start)
        safe = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, top / _LOG2E + jnp.log(safe), -jnp.inf)
        rows = lax.iota(jnp.int32, shape[0])
        place = (row_tile, head, split)
        full = lambda n: tuple(jnp.full(n, i) for i in place)
        out_ref.at[(*full(shape), spread(rows), feature)][...] = acc / spread(safe)
        lse_ref.at[(*full(shape[:1]), rows)][...] = lse


def _merge_kernel(partial_ref, partial_lse_ref, lengths_ref, num_queries_ref, *rest, launch: Launch):
    """Merges the live splits of one tile and kv head in order; dead rows give 0 and -inf."""
    sinks_ref, out_ref, lse_ref = rest if len(rest) == 3 else (None, *rest)
    row_tile, head = pl.program_id(0), pl.program_id(1)
    row, tile = row_tile // launch.tiles, row_tile % launch.tiles
    length = jnp.clip(lengths_ref[row], 0, launch.pages_per_seq * launch.page_size)
    _, group, last, _, lo, hi = tile_positions(launch, tile, length, num_queries_ref[row])
    shape = (launch.config.tile_rows, launch.padded_dim)
    rows, feature = lax.iota(jnp.int32, shape[0]), lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = lambda x: lax.broadcast_in_dim(x, shape, (0,))

    def place(split, n):
        return tuple(jnp.full(n, i) for i in (row_tile, head, split))

    def step(split, carry):
        top, total, acc = carry
        lse = partial_lse_ref[(*place(split, shape[:1]), rows)]
        part = partial_ref[(*place(split, shape), spread(rows), feature)]
        new_top = jnp.maximum(top, lse)
        decay, weight = jnp.exp(top - new_top), jnp.exp(lse - new_top)
        return new_top, total * decay + weight, acc * spread(decay) + part * spread(weight)

    start = (
        jnp.full(shape[:1], _LOWEST, jnp.float32),
        jnp.zeros(shape[:1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    per_split = launch.config.split_tokens
    top, total, acc = lax.fori_loop(lo // per_split, (hi + per_split - 1) // per_split, step, start)
    if sinks_ref is not None:
        sinks = sinks_ref[head * launch.q_per_kv + group].astype(jnp.float32)
        new_top = jnp.maximum(top, sinks)
        decay = jnp.exp(top - new_top)
        top, total, acc = new_top, total * decay + jnp.exp(sinks - new_top), acc * spread(decay)
    alive = last >= 0
    safe = jnp.where(alive, total, 1.0)
    out = jnp.where(spread(alive), acc / spread(safe), 0.0)
    at = tuple(jnp.full(shape, i) for i in (row_tile, head))
    out_ref.at[(*at, spread(rows), feature)][...] = out.astype(out_ref.dtype)
    at = tuple(jnp.full(shape[:1], i) for i in (row_tile, head))
    lse_ref.at[(*at, rows)][...] = jnp.where(alive, top + jnp.log(safe), -jnp.inf)


def paged_attention_triton(
    problem: Problem, options: AttentionOptions, config: KernelConfig, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its pages.

    Args:
      problem: checked by the public operation; see `pallas_kernels.paged_attention`.
      options: static options.
      config: tile sizes, from `kernel_config`.
      interpret: run on the CPU by Pallas's interpreter, for tests.

    Returns:
      out [batch, queries, heads, head_dim] in q.dtype and lse f32[batch, queries, heads].
    """
    launch = make_launch(problem, options, config)
    batch = problem.q.shape[0]
    per_page, row_tokens = launch.page_size // launch.row_tokens, launch.row_tokens
    count = launch.num_pages * launch.kv_heads * per_page
    view = lambda pages: pages.reshape(count, row_tokens, launch.head_dim)
    scales = [x.reshape(count, row_tokens) for x in (problem.k_scales, problem.v_scales) if x is not None]
    head = (batch * launch.tiles, launch.kv_heads)
    tile = (config.tile_rows, launch.padded_dim)
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    f32 = jnp.float32
    rows = (problem.lengths, problem.num_queries)
    partial, partial_lse = pl.pallas_call(
        functools.partial(_attend_kernel, launch=launch),
        grid=(*head, launch.splits),
        out_shape=(
            jax.ShapeDtypeStruct((*head, launch.splits, *tile), f32),
            jax.ShapeDtypeStruct((*head, launch.splits, tile[0]), f32),
        ),
        compiler_params=params,
        interpret=interpret,
        name="paged_attention",
    )(problem.q, view(problem.k_pages), view(problem.v_pages), problem.block_tables, *rows, *scales)
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, launch=launch),
        grid=head,
        out_shape=(
            jax.ShapeDtypeStruct((*head, *tile), problem.q.dtype),
            jax.ShapeDtypeStruct((*head, tile[0]), f32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8 if math.prod(tile) >= 4096 else 4, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(partial, partial_lse, *rows, *(() if problem.sinks is None else (problem.sinks,)))
    return ungroup(out[..., : launch.head_dim], launch, batch), ungroup(lse, launch, batch)
