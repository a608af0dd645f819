"""Paged attention by the native kernels: one call for decoding, prompts and several queries, with every option of the operation.

Keys and values are read where they lie, page by page, and no farther than a row's own tokens; scores, sums and results are in float32. Bits
do not depend on the queries that run together, on pages, tables or threads: `deterministic` asks for what is so anyway.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import AttentionOptions


def paged_attention_cpu(problem: Problem, options: AttentionOptions, target: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Attention of each row's queries over its pages.

    Args:
      problem: checked by the public operation; see `pallas_kernels.paged_attention`.
      options: static options.
      target: one of the library's targets; None is the one in use. For tests.

    Returns:
      out [batch, queries, heads, head_dim] in q.dtype and lse f32[batch, queries, heads].
    """
    q, sinks = problem.q, problem.sinks
    scales = [x for x in (problem.k_scales, problem.v_scales) if x is not None]
    arrays = [*problem[:6], *([] if sinks is None else [sinks.astype(jnp.float32)]), *scales]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)]
    out, lse = library.call(
        "attention",
        results,
        *arrays,
        target=target,
        scale=np.float32(options.scale),
        soft_cap=np.float32(options.logits_soft_cap or 0.0),
        window=np.int64(options.sliding_window or 0),
        sinks=sinks is not None,
        scales=bool(scales),
    )
    return out, lse
