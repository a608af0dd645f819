"""Paged attention for NVIDIA GPUs from sm_80 on, in Pallas's Triton backend (jax 0.10.2 to 0.12; deprecated there since 0.11).

One program takes one tile of (query, head of the group) pairs of one row and kv head, and one split of that row's keys:

    grid     (batch * tiles, kv_heads, splits)
    tile     flat index query * q_per_kv + head of the group, cut every `tile_rows`: any group size, no padding per group
    split    keys [s * split_tokens, (s + 1) * split_tokens) at absolute positions; a program without live keys does nothing

It writes a normalised partial result and its lse in float32. A second kernel merges the live splits of each tile in order and
adds the sinks, so a row's bits depend neither on its batch mates nor on the table's width.

Pages are loaded as rows of `gcd(page_size, block_tokens)` tokens, a whole page where it fits the block and a part of one where
it does not. Only live tokens inside the window of some query of the tile are loaded; the others read as 0, so that no NaN
enters. Features are padded to a power of two in registers only.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.config import KernelConfig
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import INT32_MAX, AttentionOptions

_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)
_LOG2E = math.log2(math.e)


class Plan(NamedTuple):
    """Static sizes of one launch; `rows` = queries * q_per_kv, `page_rows` = rows of the 2-D pool view per page."""

    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    tiles: int
    splits: int
    config: KernelConfig
    options: AttentionOptions

    @property
    def q_per_kv(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """(query, head of the group) pairs per row and kv head."""
        return self.queries * self.q_per_kv

    @property
    def padded_dim(self) -> int:
        """head_dim up to the next power of two."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def row_tokens(self) -> int:
        """Tokens per row of the pool's view: a whole page, or the part of one that divides the block."""
        return math.gcd(self.page_size, self.config.block_tokens)


def make_plan(problem: Problem, options: AttentionOptions, config: KernelConfig) -> Plan:
    """The sizes of one launch.

    Raises:
      NotImplementedError: an offset into the pool would overflow the 32-bit offsets of the backend.
    """
    _, queries, heads, head_dim = problem.q.shape
    num_pages, kv_heads, page_size, _ = problem.k_pages.shape
    width = problem.block_tables.shape[1]
    check_offsets(problem.k_pages.shape, jnp.dtype(problem.k_pages.dtype).itemsize)
    rows = queries * (heads // kv_heads)
    return Plan(
        queries, heads, kv_heads, head_dim, num_pages, page_size, width,
        tiles=-(-rows // config.tile_rows),
        splits=-(-width * page_size // config.split_tokens),
        config=config, options=options,
    )  # fmt: skip


def check_offsets(shape: tuple[int, ...], itemsize: int) -> None:
    """Refuses pools whose element offsets the Triton backend would compute in 32 bits and overflow.

    It takes 64-bit offsets for arrays of more than 2**32 bytes only, and offsets count elements and are signed: an array of
    one-byte elements between the two limits would wrap. (lowering.py of jax, `_compute_offsets_from_indices`.)

    Raises:
      NotImplementedError: the pool lies between the limits.
    """
    elements = math.prod(shape)
    if elements - 1 > INT32_MAX and elements * itemsize <= 2**32:
        raise NotImplementedError(
            f"pages {tuple(shape)} have {elements} elements of {itemsize} byte: offsets would overflow int32 in the Triton "
            "backend; make the pool smaller than 2**31 elements or larger than 2**32 bytes, or use implementation='xla'"
        )


def block_range(plan: Plan, split: jax.Array, lo: jax.Array, hi: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[] first block and the one behind the last that a program reads, of the keys [lo, hi) its tile sees."""
    per_split, per_block = plan.config.split_tokens, plan.config.block_tokens
    begin = jnp.maximum(split * per_split, lo) // per_block
    return begin, (jnp.minimum((split + 1) * per_split, hi) + per_block - 1) // per_block


def tile_positions(plan: Plan, tile: jax.Array, length: jax.Array, num_queries: jax.Array):
    """(query, group head, last, first) i32[tile_rows] of a tile's rows and the scalar key range [lo, hi) any of them sees."""
    rows = plan.config.tile_rows
    flat = tile * rows + lax.iota(jnp.int32, rows)
    query, head = flat // plan.q_per_kv, flat % plan.q_per_kv
    own = length - num_queries + query
    last = jnp.where((query < num_queries) & (query < plan.queries) & (own >= 0) & (own < length), own, -1)
    window = plan.options.sliding_window
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - (window - 1), 0)
    lowest = tile * rows // plan.q_per_kv
    highest = jnp.minimum((tile * rows + rows - 1) // plan.q_per_kv, jnp.minimum(num_queries, plan.queries) - 1)
    hi = jnp.where(highest >= lowest, length - num_queries + highest + 1, 0)
    lo = jnp.int32(0) if window is None else jnp.maximum(length - num_queries + lowest - (window - 1), 0)
    return query, head, last, first, lo, jnp.minimum(hi, length)


def _row_numbers(plan: Plan, tables_ref, row, head, position, live):
    """Rows of the pool seen as [rows, row_tokens, head_dim] that hold the tokens at `position` (any shape)."""
    column = jnp.minimum(position // plan.page_size, plan.pages_per_seq - 1)
    page = plgpu.load(tables_ref.at[jnp.full_like(column, row), column], mask=live, other=0)
    page = jnp.clip(page, 0, plan.num_pages - 1)
    per_page = plan.page_size // plan.row_tokens
    return (page * plan.kv_heads + head) * per_page + (position % plan.page_size) // plan.row_tokens


def _load_features(ref, rows, token, live, plan: Plan) -> jax.Array:
    """[block_tokens, padded_dim] of a pool seen as [rows, row_tokens, head_dim]; dead tokens and padding are 0."""
    shape = (*live.shape, plan.padded_dim)
    feature = lax.broadcasted_iota(jnp.int32, shape, 2)
    mask = lax.broadcast_in_dim(live, shape, (0, 1))
    if plan.padded_dim != plan.head_dim:
        mask = mask & (feature < plan.head_dim)
    index = (lax.broadcast_in_dim(rows, shape, (0,)), lax.broadcast_in_dim(token, shape, (1,)), feature)
    zero = 0.0 if jnp.issubdtype(ref.dtype, jnp.floating) else 0
    values = plgpu.load(ref.at[index], mask=mask, other=zero)
    return values.reshape(plan.config.block_tokens, plan.padded_dim)


def _load_scales(ref, rows, token, live, plan: Plan) -> jax.Array:
    """f32[block_tokens] of scales seen as [rows, row_tokens]; dead tokens are 0."""
    index = (lax.broadcast_in_dim(rows, live.shape, (0,)), lax.broadcast_in_dim(token, live.shape, (1,)))
    return plgpu.load(ref.at[index], mask=live, other=0.0).reshape(plan.config.block_tokens)


def _dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    """f32 product over a's last axis. Float32 inputs are multiplied as float32, not on tensor cores: one tf32 product is good
    to 1e-3 only, and three of them take over 128 registers."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _block_step(plan: Plan, refs, q, place, positions, block, carry):
    """One block of keys: the online softmax of the tile, carry = (top, total, acc) in float32, base 2."""
    k_ref, v_ref, tables_ref, k_scales_ref, v_scales_ref = refs
    row, head = place
    last, first, lo, hi = positions
    top, total, acc = carry
    block_tokens, row_tokens = plan.config.block_tokens, plan.row_tokens
    start = block * block_tokens + lax.iota(jnp.int32, block_tokens // row_tokens) * row_tokens
    rows = _row_numbers(plan, tables_ref, row, head, start, start < hi)
    token = lax.iota(jnp.int32, row_tokens)
    each = lax.broadcast_in_dim(start, (block_tokens // row_tokens, row_tokens), (0,)) + lax.broadcasted_iota(
        jnp.int32, (block_tokens // row_tokens, row_tokens), 1
    )
    live = (each >= lo) & (each < hi)
    k = _load_features(k_ref, rows, token, live, plan).astype(q.dtype)
    s = _dot(q, k, 1) * plan.options.scale
    if k_scales_ref is not None:
        s = s * _load_scales(k_scales_ref, rows, token, live, plan)[None, :]
    cap = plan.options.logits_soft_cap
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
        p = p * _load_scales(v_scales_ref, rows, token, live, plan)[None, :]
    v = _load_features(v_ref, rows, token, live, plan).astype(q.dtype)
    return new_top, total, acc * decay[:, None] + _dot(p.astype(q.dtype), v, 0)


def _attend_kernel(q_ref, k_ref, v_ref, tables_ref, lengths_ref, num_queries_ref, *rest, plan: Plan):
    """Writes one split's normalised result f32[tile_rows, padded_dim] and lse f32[tile_rows] (natural log)."""
    k_scales_ref, v_scales_ref, out_ref, lse_ref = rest if len(rest) == 4 else (None, None, *rest)
    row_tile, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, tile = row_tile // plan.tiles, row_tile % plan.tiles
    length = jnp.clip(lengths_ref[row], 0, plan.pages_per_seq * plan.page_size)
    query, group, last, first, lo, hi = tile_positions(plan, tile, length, num_queries_ref[row])
    shape = (plan.config.tile_rows, plan.padded_dim)
    feature = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = lambda x: lax.broadcast_in_dim(x, shape, (0,))
    index = (jnp.full(shape, row), spread(query), spread(head * plan.q_per_kv + group), feature)
    q = plgpu.load(q_ref.at[index], mask=spread(query < plan.queries) & (feature < plan.head_dim), other=0)
    begin, end = block_range(plan, split, lo, hi)

    @pl.when(begin < end)
    def _():
        refs = (k_ref, v_ref, tables_ref, k_scales_ref, v_scales_ref)
        step = functools.partial(_block_step, plan, refs, q, (row, head), (last, first, lo, hi))
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


def _merge_kernel(partial_ref, partial_lse_ref, lengths_ref, num_queries_ref, *rest, plan: Plan):
    """Merges the live splits of one tile and kv head in order; dead rows give 0 and -inf."""
    sinks_ref, out_ref, lse_ref = rest if len(rest) == 3 else (None, *rest)
    row_tile, head = pl.program_id(0), pl.program_id(1)
    row, tile = row_tile // plan.tiles, row_tile % plan.tiles
    length = jnp.clip(lengths_ref[row], 0, plan.pages_per_seq * plan.page_size)
    _, group, last, _, lo, hi = tile_positions(plan, tile, length, num_queries_ref[row])
    shape = (plan.config.tile_rows, plan.padded_dim)
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
    per_split = plan.config.split_tokens
    top, total, acc = lax.fori_loop(lo // per_split, (hi + per_split - 1) // per_split, step, start)
    if sinks_ref is not None:
        sinks = sinks_ref[head * plan.q_per_kv + group].astype(jnp.float32)
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

    Raises:
      NotImplementedError: a pool whose offsets would overflow; see `check_offsets`.
    """
    plan = make_plan(problem, options, config)
    batch = problem.q.shape[0]
    per_page, row_tokens = plan.page_size // plan.row_tokens, plan.row_tokens
    count = plan.num_pages * plan.kv_heads * per_page
    view = lambda pages: pages.reshape(count, row_tokens, plan.head_dim)
    scales = [x.reshape(count, row_tokens) for x in (problem.k_scales, problem.v_scales) if x is not None]
    head = (batch * plan.tiles, plan.kv_heads)
    tile = (config.tile_rows, plan.padded_dim)
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    f32 = jnp.float32
    rows = (problem.lengths, problem.num_queries)
    partial, partial_lse = pl.pallas_call(
        functools.partial(_attend_kernel, plan=plan),
        grid=(*head, plan.splits),
        out_shape=(
            jax.ShapeDtypeStruct((*head, plan.splits, *tile), f32),
            jax.ShapeDtypeStruct((*head, plan.splits, tile[0]), f32),
        ),
        compiler_params=params,
        interpret=interpret,
        name="paged_attention",
    )(problem.q, view(problem.k_pages), view(problem.v_pages), problem.block_tables, *rows, *scales)
    out, lse = pl.pallas_call(
        functools.partial(_merge_kernel, plan=plan),
        grid=head,
        out_shape=(
            jax.ShapeDtypeStruct((*head, *tile), problem.q.dtype),
            jax.ShapeDtypeStruct((*head, tile[0]), f32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8 if math.prod(tile) >= 4096 else 4, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(partial, partial_lse, *rows, *(() if problem.sinks is None else (problem.sinks,)))
    return ungroup(out[..., : plan.head_dim], plan, batch), ungroup(lse, plan, batch)


def ungroup(x: jax.Array, plan: Plan, batch: int) -> jax.Array:
    """[batch * tiles, kv_heads, tile_rows, ...] -> [batch, queries, heads, ...], the padding rows cut off."""
    tail = x.shape[3:]
    x = x.reshape(batch, plan.tiles, plan.kv_heads, plan.config.tile_rows, *tail)
    x = jnp.moveaxis(x, 2, 1).reshape(batch, plan.kv_heads, plan.tiles * plan.config.tile_rows, *tail)
    x = x[:, :, : plan.rows].reshape(batch, plan.kv_heads, plan.queries, plan.q_per_kv, *tail)
    return jnp.moveaxis(x, 2, 1).reshape(batch, plan.queries, plan.heads, *tail)
