"""Runs a NumPy case through the native attention kernel of one kind of processor."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_oracle import Case

from pallas_kernels.cpu.paged_attention import paged_attention_cpu
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import AttentionOptions

ARRAYS = ("sinks", "k_scales", "v_scales")


@functools.cache
def jitted(options: AttentionOptions, target: str | None):
    return jax.jit(lambda problem: paged_attention_cpu(problem, options, target))


def native(case: Case, target: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of the kernel for one kind of processor."""
    fields = (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)
    arrays = [case.options.get(name) for name in ARRAYS]
    static = {"scale": case.q.shape[-1] ** -0.5} | {k: v for k, v in case.options.items() if k not in ARRAYS}
    problem = Problem(*map(jnp.asarray, fields), *(None if x is None else jnp.asarray(x) for x in arrays))
    out, lse = jitted(AttentionOptions(**static), target)(problem)
    return np.asarray(out), np.asarray(lse)
