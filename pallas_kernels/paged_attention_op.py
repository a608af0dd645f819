"""The public operations: they check, bring every call to one 4-D form and carry the gradient."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (a custom_vjp hands symbolic zeros and float0 where the types say arrays)

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import options as opts
from pallas_kernels.choice import check_name
from pallas_kernels.gpu import named_capability
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_attention_grad import paged_attention_gradient
from pallas_kernels.paged_attention_lowering import run_attention
from pallas_kernels.varying import vary_like


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _attend(
    problem: Problem, options: AttentionOptions, implementation: str | None, capability: str | None
) -> tuple[jax.Array, jax.Array]:
    return run_attention(problem, options, implementation, capability)


def _attend_forward(problem, options, implementation, capability):
    moved = [
        name
        for name, leaf in zip(Problem._fields, problem)
        if leaf is not None and leaf.perturbed and name in ("k_scales", "v_scales")
    ]
    if problem.k_scales is not None:
        moved += [name for name in ("k_pages", "v_pages") if getattr(problem, name).perturbed]
    if moved:
        raise ValueError(
            f"paged_attention is not differentiable with respect to {', '.join(moved)} of quantized pages: hold them fixed "
            "(jax.lax.stop_gradient), or dequantize the pages to float32 or bfloat16 and pass those"
        )
    problem = Problem(*(None if leaf is None else leaf.value for leaf in problem))
    results = run_attention(problem, options, implementation, capability)
    return results, (problem, results)


def _attend_backward(options, implementation, capability, residuals, cotangents):
    del implementation, capability
    problem, results = residuals
    given = tuple(
        jnp.zeros(r.shape, r.dtype) if isinstance(c, jax.custom_derivatives.SymbolicZero) else c
        for c, r in zip(cotangents, results)
    )
    dq, dk, dv, dsinks = paged_attention_gradient(problem, options, results, given)
    none = lambda x: None if x is None else np.zeros(x.shape, jax.dtypes.float0)
    if problem.k_scales is not None:
        zero = lambda x: none(x) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.zeros_like(x)
        dk, dv = zero(problem.k_pages), zero(problem.v_pages)
    blank = lambda x: None if x is None else jnp.zeros_like(x)
    return (
        Problem(
            dq, dk, dv, none(problem.block_tables), none(problem.lengths), none(problem.num_queries),
            dsinks, blank(problem.k_scales), blank(problem.v_scales),
        ),
    )  # fmt: skip


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def paged_attention(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, block_tables: jax.Array, lengths: jax.Array, *,
    num_queries: jax.Array | None = None, scale: float | None = None, sliding_window: int | None = None,
    logits_soft_cap: float | None = None, sinks: jax.Array | None = None, k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None, return_lse: bool = False, deterministic: bool = False, implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:  # fmt: skip
    """Causal attention of each row's newest tokens over the keys and values in its pages.

    The new tokens' own keys and values must be in their pages already. Works under `jax.jit`, `jax.vmap` and `jax.grad`; the axis words
    and the picture of where a query stands are in `pallas_kernels.options`.

    Args:
      q: [batch, heads, head_dim] or [batch, queries, heads, head_dim], float32, bfloat16 or float16.
      k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q.dtype, or int8, float8_e4m3fn, float8_e5m2 with
        scales. Only the visible slots count: anything, NaN too, may stand in the others.
      block_tables: i32[batch, pages_per_seq]; entries behind a row's live pages may hold anything.
      lengths: i32[batch], valid tokens of each row, its new ones included; 0 is a dead row, whose result is 0.
      num_queries: i32[batch] or None (all), for a 4-D q: the first num_queries queries of the row are real, at positions
        lengths - num_queries + i; the others give 0.
      scale: python number on q . k; None is head_dim ** -0.5.
      sliding_window: python int or None; a query at position p sees keys in (p - sliding_window, p].
      logits_soft_cap: python number or None; scores become cap * tanh(score / cap).
      sinks: floating [heads] or None: one more logit per head that takes probability and adds no value. It is neither
        scaled nor capped.
      k_scales, v_scales: f32[num_pages, kv_heads, page_size], with quantized pages only: value = stored * scale.
      return_lse: also return the log of the softmax denominator (sink included), to merge partial results.
      deterministic: a query's bits do not depend on how many queries run with it (decode equals prefill).
      implementation: "xla", "cpu", "triton", "mosaic", "triton_interpret", "mosaic_interpret", or None for the best one of the
        platform that the program is lowered for: "triton" on CUDA, "cpu" on a CPU where the native kernels are built, "xla" elsewhere.

    Returns:
      out like q; with return_lse also lse f32[batch, heads] or [batch, queries, heads]. Dead queries: 0 and -inf.

    Raises:
      ValueError: a shape, dtype or option is wrong, or gradients of quantized pages or scales are asked for.
      NotImplementedError: the implementation asked for by name cannot take such pages or, said when the program is lowered and before
        anything runs, cannot run on its platform. There is no fallback.

    Source: online softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867); pages as in PagedAttention (arXiv:2309.06180).
    """
    q4 = _four_axes(q, num_queries)
    opts.check_pages(k_pages, v_pages, k_scales, v_scales)
    opts.check_queries(q4, k_pages, block_tables, lengths, num_queries, sinks)
    check_name(implementation, k_pages.shape, k_pages.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = AttentionOptions(scale, sliding_window, logits_soft_cap, deterministic)
    if num_queries is None:
        num_queries = jnp.full((q4.shape[0],), q4.shape[1], jnp.int32)
    # A derivative varies as what it is of: where the arrays differ in that, this cast's own derivative adds up what devices have.
    problem = vary_like(Problem(q4, k_pages, v_pages, block_tables, lengths, num_queries, sinks, k_scales, v_scales))
    results = _attend_if_any(problem, options, implementation)
    out, lse = (x[:, 0] for x in results) if q.ndim == 3 else results
    return (out, lse) if return_lse else out


def _four_axes(q: jax.Array, num_queries: jax.Array | None) -> jax.Array:
    """Queries with an axis for the new tokens of a row, which plain decode leaves out."""
    if q.ndim not in (3, 4):
        raise ValueError(f"q must be [batch, heads, head_dim] or [batch, queries, heads, head_dim], got shape {q.shape}")
    if q.ndim == 3 and num_queries is not None:
        raise ValueError("num_queries goes with a 4-D q; a 3-D q has one query per row")
    return q[:, None] if q.ndim == 3 else q


def _attend_if_any(problem: Problem, options: AttentionOptions, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """The attention of the queries, if there are any."""
    q = problem.q
    if 0 in q.shape:
        return jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], jnp.float32)
    out, lse = _attend(problem, options, implementation, named_capability())
    return out, lse


def paged_prefill_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    length: jax.Array,
    num_queries: jax.Array | None = None,
    **options,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of a chunk of one sequence's newest tokens over that sequence's pages.

    The same operation as `paged_attention` with one row and many queries, without the row axis.

    Args:
      q: [chunk, heads, head_dim].
      k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim].
      block_table: i32[pages_per_seq].
      length: i32[], valid tokens after this chunk's write.
      num_queries: i32[] or None (= chunk): how many of the chunk are real; the others give 0.
      **options: the keyword options of `paged_attention`, but num_queries.

    Returns:
      out [chunk, heads, head_dim]; with return_lse also lse f32[chunk, heads].

    Raises:
      ValueError, NotImplementedError: as `paged_attention`.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [chunk, heads, head_dim], got shape {q.shape}")
    if block_table.ndim != 1:
        raise ValueError(f"block_table must be [pages_per_seq], got shape {block_table.shape}")
    row = lambda x: None if x is None else jnp.asarray(x, jnp.int32).reshape(1)
    result = paged_attention(q[None], k_pages, v_pages, block_table[None], row(length), num_queries=row(num_queries), **options)
    return jax.tree.map(lambda x: x[0], result)
