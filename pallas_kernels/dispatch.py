"""Which implementation runs: the best one of the platform, or the one asked for by name, or an error that says why not."""

from __future__ import annotations

import jax

from pallas_kernels.options import IMPLEMENTATIONS, AttentionOptions
from pallas_kernels.paged_attention_xla import QUERY_TILE, Problem, paged_attention_xla


def choose_implementation(
    implementation: str | None, q_dtype: jax.typing.DTypeLike, page_dtype: jax.typing.DTypeLike
) -> str:
    """The name of the implementation that will run.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: it cannot run here.
    """
    del q_dtype, page_dtype
    if implementation is None:
        return "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation != "xla":
        raise NotImplementedError(f"implementation {implementation!r} is not available")
    return implementation


def run_implementation(
    problem: Problem, options: AttentionOptions, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """(out [batch, queries, heads, head_dim] in q.dtype, lse f32[batch, queries, heads]) by the implementation chosen."""
    return paged_attention_xla(problem, options, query_tile=QUERY_TILE if options.deterministic else None)
