"""Paged attention for NVIDIA GPUs in Pallas's Mosaic GPU backend (jax >= 0.11): one source for sm_80, sm_90 and sm_100.

The successor of the Triton kernel. One warpgroup takes one tile of 16 (query, head of the group) pairs of one row and kv head, and
one split of that row's keys, with the same splits and the same partial results as the Triton kernel:

    pages -> shared memory     cp.async on sm_80, TMA from sm_90 on; two stages of BLOCK_TOKENS keys, whole pages or parts of one
    scores [16, keys]          mma: q [16, head_dim] in registers, keys read transposed from shared memory
    p -> shared memory -> p    from the accumulator's layout to an operand's
    out [16, head_dim]         mma: p, values read through ldmatrix

Whole pages are copied, dead slots too, so the values of unseen slots are set to 0 in registers.

What it does not do: float32, int8 and fp8 pages, head_dim that is no multiple of 32, page sizes that neither divide BLOCK_TOKENS nor
are a multiple of it or are below 8. Those calls raise; the Triton kernel takes them. It has been compiled, and run in
Mosaic's interpreter (with a plain product in place of `mma`, which that lacks); it has not run on a GPU.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# (written for jax >= 0.11, whose names an older jax lacks)

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.config import MOSAIC_BLOCK_TOKENS as BLOCK_TOKENS
from pallas_kernels.config import MOSAIC_STAGES as STAGES
from pallas_kernels.config import MOSAIC_TILE_ROWS as TILE_ROWS
from pallas_kernels.config import KernelConfig
from pallas_kernels.key_blocks import Problem
from pallas_kernels.launch import Launch, block_part, block_range, key_range, make_launch, tile_positions, ungroup
from pallas_kernels.options import AttentionOptions

_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)
_LOG2E = math.log2(math.e)


def _tile_width(launch: Launch, config: KernelConfig) -> int:
    """Features per tile of shared memory, the widest that fits; one cp.async (sm_80) must fill a multiple of four tiles."""
    rows = min(launch.page_size, BLOCK_TOKENS) // 8
    for width in (64, 32, 16):
        if launch.head_dim % width == 0 and (config.generation != "sm_80" or rows * (launch.head_dim // width) % 4 == 0):
            return width
    raise AssertionError(f"pages of {launch.page_size} x {launch.head_dim} should have been refused for {config.generation}")


def _copy_block(launch: Launch, refs, place, block, slot) -> None:
    """Starts the copies of one block's pages into stage `slot`; in the place of pages that no query sees, the null page."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    k_ref, v_ref, tables_ref, k_smem, v_smem, barrier = refs
    row, head, lo, hi = place
    part = min(launch.page_size, BLOCK_TOKENS)
    for i in range(BLOCK_TOKENS // part):
        start, column, seen = block_part(launch, block, i, lo, hi)
        page = jnp.where(seen, jnp.clip(tables_ref[row, column], 0, launch.num_pages - 1), 0)
        for pages, smem in ((k_ref, k_smem), (v_ref, v_smem)):
            source = pages.at[page, head, pl.ds(pl.multiple_of(start % launch.page_size, part), part)]
            target = smem.at[slot, pl.ds(i * part, part)]
            if barrier is None:
                plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
            else:
                plgpu.copy_gmem_to_smem(source, target, barrier.at[slot])


def _wait_block(copies: int, barrier, slot, is_last) -> None:
    """Waits for the older stage: by its barrier, or (cp.async) by leaving the younger stage's copies in flight."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if barrier is not None:
        plgpu.barrier_wait(barrier.at[slot])
        return
    pl.when(is_last)(lambda: plgpu.wait_gmem_to_smem(0))
    pl.when(jnp.logical_not(is_last))(lambda: plgpu.wait_gmem_to_smem(copies))


def _attend_block(launch: Launch, dtype, mma, q, smem, bounds, block, slot, carry):
    """The online softmax over one block in shared memory; carry = (top, total, acc) in float32, base 2."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    lhs, rhs, acc_layout = (getattr(plgpu.Layout, f"MMA_{x}")(dtype, m_warps=1) for x in ("LHS", "RHS", "ACC"))
    k_smem, v_smem, p_smem = smem
    tile, length, num_queries, lo, hi = bounds
    top, total, acc = carry
    shape = (TILE_ROWS, BLOCK_TOKENS)
    zeros = lambda n: plgpu.layout_cast(jnp.zeros((TILE_ROWS, n), jnp.float32), acc_layout)
    k = plgpu.load(k_smem.at[slot].T, layout=rhs)
    s = mma(zeros(BLOCK_TOKENS), q, k) * launch.options.scale
    cap = launch.options.logits_soft_cap
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=acc_layout)
    query = (tile * TILE_ROWS + iota(0)) // launch.q_per_kv
    own = length - num_queries + query
    position = block * BLOCK_TOKENS + iota(1)
    seen = (position <= own) & (query < num_queries) & (own < length)
    if launch.options.sliding_window is not None:
        seen = seen & (position > own - launch.options.sliding_window)
    s = jnp.where(seen, s * _LOG2E, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(s, axis=1))
    wide = lambda x, n: plgpu.layout_cast(lax.broadcast_in_dim(x, (TILE_ROWS, n), (0,)), acc_layout)
    p = jnp.exp2(s - wide(new_top, BLOCK_TOKENS))
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.sum(p, axis=1)
    plgpu.store(p_smem, p.astype(dtype), optimized=False)
    v = plgpu.load(v_smem.at[slot], layout=rhs)
    token = block * BLOCK_TOKENS + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=rhs)
    v = jnp.where((token >= lo) & (token < hi), v, jnp.zeros_like(v))
    acc = acc * wide(decay, launch.head_dim)
    return new_top, total, mma(acc, plgpu.load(p_smem, layout=lhs, optimized=False), v)


def _body(*refs, launch: Launch, dtype, mma):
    """One program; refs = the inputs, then the outputs, then the scratch of `paged_attention_mosaic`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    q_ref, k_ref, v_ref, tables_ref, lengths_ref, num_queries_ref, out_ref, lse_ref, k_smem, v_smem, p_smem, *rest = refs
    barrier = rest[0] if rest else None
    row_tile, head, split = (lax.axis_index(name) for name in ("row_tile", "head", "split"))
    row, tile = row_tile // launch.tiles, row_tile % launch.tiles
    length = jnp.clip(lengths_ref[row], 0, launch.pages_per_seq * launch.page_size)
    num_queries = num_queries_ref[row]
    lo, hi = key_range(launch, tile, length, num_queries)
    begin, end = block_range(launch, split, lo, hi)
    copied = (k_ref, v_ref, tables_ref, k_smem, v_smem, barrier)
    copies = 2 * max(1, BLOCK_TOKENS // launch.page_size)

    @pl.when(begin < end)
    def _():
        acc_layout = plgpu.Layout.MMA_ACC(dtype, m_warps=1)
        place = (row, head, lo, hi)
        _copy_block(launch, copied, place, begin, 0)
        q = plgpu.load(q_ref.at[row_tile, head], layout=plgpu.Layout.MMA_LHS(dtype, m_warps=1), optimized=False)

        def step(block, carry):
            slot, is_last = (block - begin) % STAGES, block + 1 >= end
            pl.when(jnp.logical_not(is_last))(lambda: _copy_block(launch, copied, place, block + 1, (slot + 1) % STAGES))
            _wait_block(copies, barrier, slot, is_last)
            bounds = (tile, length, num_queries, lo, hi)
            return _attend_block(launch, dtype, mma, q, (k_smem, v_smem, p_smem), bounds, block, slot, carry)

        vector = lambda x: plgpu.layout_cast(jnp.full((TILE_ROWS,), x, jnp.float32), acc_layout.reduce(1))
        start = (
            vector(_LOWEST),
            vector(0.0),
            plgpu.layout_cast(jnp.zeros((TILE_ROWS, launch.head_dim), jnp.float32), acc_layout),
        )
        top, total, acc = lax.fori_loop(begin, end, step, start)
        safe = jnp.where(total > 0.0, total, 1.0)
        wide = plgpu.layout_cast(lax.broadcast_in_dim(safe, acc.shape, (0,)), acc_layout)
        plgpu.store(out_ref.at[row_tile, head, split], acc / wide, optimized=False)
        lse = jnp.where(total > 0.0, top * (1.0 / _LOG2E) + jnp.log(safe), -jnp.inf)
        plgpu.store(lse_ref.at[row_tile, head, split], lse, optimized=False)


def _merge(launch: Launch, problem: Problem, partial: jax.Array, partial_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges the live splits of each tile in order; what dead programs left unwritten is never looked at."""
    batch = problem.q.shape[0]
    rows = jnp.repeat(problem.lengths, launch.tiles), jnp.repeat(problem.num_queries, launch.tiles)
    lengths = jnp.clip(rows[0], 0, launch.pages_per_seq * launch.page_size)
    tiles = jnp.tile(lax.iota(jnp.int32, launch.tiles), batch)
    _, group, last, _, lo, hi = jax.vmap(functools.partial(tile_positions, launch))(tiles, lengths, rows[1])
    lo = jnp.broadcast_to(lo, hi.shape)

    def step(split, carry):
        top, total, acc = carry
        begin, end = block_range(launch, split, lo, hi)
        live = (begin < end)[:, None, None]
        lse = jnp.where(live, partial_lse[:, :, split], -jnp.inf)
        part = jnp.where(live[..., None], partial[:, :, split], 0.0)
        new_top = jnp.maximum(top, lse)
        decay, weight = jnp.exp(top - new_top), jnp.exp(lse - new_top)
        return new_top, total * decay + weight, acc * decay[..., None] + part * weight[..., None]

    shape = (*partial.shape[:2], TILE_ROWS)
    start = (
        jnp.full(shape, _LOWEST, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, launch.head_dim), jnp.float32),
    )
    top, total, acc = lax.fori_loop(0, launch.splits, step, start)
    if problem.sinks is not None:
        index = lax.iota(jnp.int32, launch.kv_heads)[None, :, None] * launch.q_per_kv + group[:, None, :]
        sinks = problem.sinks.astype(jnp.float32)[index]
        new_top = jnp.maximum(top, sinks)
        decay = jnp.exp(top - new_top)
        top, total, acc = new_top, total * decay + jnp.exp(sinks - new_top), acc * decay[..., None]
    alive = jnp.broadcast_to((last >= 0)[:, None, :], shape)
    safe = jnp.where(alive, total, 1.0)
    out = jnp.where(alive[..., None], acc / safe[..., None], 0.0).astype(problem.q.dtype)
    lse = jnp.where(alive, top + jnp.log(safe), -jnp.inf)
    return ungroup(out, launch, batch), ungroup(lse, launch, batch)


def _interpreted_mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """`plgpu.mma`, which Mosaic's interpreter lacks."""
    return acc + lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def paged_attention_mosaic(
    problem: Problem, options: AttentionOptions, config: KernelConfig, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its pages; the arguments and results of `paged_attention_triton`.

    `choice.mosaic_refusal` has been asked before.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    launch = make_launch(problem, options, config)
    batch, dtype = problem.q.shape[0], jnp.dtype(problem.q.dtype)
    padded = launch.tiles * TILE_ROWS
    q = problem.q.reshape(batch, launch.queries, launch.kv_heads, launch.q_per_kv, launch.head_dim)
    q = jnp.moveaxis(q, 2, 1).reshape(batch, launch.kv_heads, launch.rows, launch.head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - launch.rows), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, launch.kv_heads, launch.tiles, TILE_ROWS, launch.head_dim), 2, 1)
    q = q.reshape(batch * launch.tiles, launch.kv_heads, TILE_ROWS, launch.head_dim)
    width = _tile_width(launch, config)
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
    buffer = lambda: plgpu.SMEM((STAGES, BLOCK_TOKENS, launch.head_dim), dtype, transforms=transforms)
    scratch = [buffer(), buffer(), plgpu.SMEM((TILE_ROWS, BLOCK_TOKENS), dtype)]
    if config.generation != "sm_80":
        scratch.append(plgpu.Barrier(num_arrivals=2 * max(1, BLOCK_TOKENS // launch.page_size), num_barriers=STAGES))
    head = (batch * launch.tiles, launch.kv_heads, launch.splits, TILE_ROWS)
    kernel = plgpu.kernel(
        functools.partial(_body, launch=launch, dtype=dtype, mma=_interpreted_mma if interpret else plgpu.mma),
        out_type=(jax.ShapeDtypeStruct((*head, launch.head_dim), jnp.float32), jax.ShapeDtypeStruct(head, jnp.float32)),
        scratch_types=scratch,
        grid=head[:3],
        grid_names=("row_tile", "head", "split"),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    partial, partial_lse = kernel(
        q, problem.k_pages, problem.v_pages, problem.block_tables, problem.lengths, problem.num_queries
    )
    return _merge(launch, problem, partial, partial_lse)
