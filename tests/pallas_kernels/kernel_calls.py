"""Runs a NumPy case through the public operation, and compares it with the oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_oracle import Case, dense_attention

import pallas_kernels
from pallas_kernels.cpu import library

# Rounding of the output, of p and of the inputs' products; bf16 has 8 bits, fp16 11. Relative to the largest |v| of a case.
NATIVE = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(jax.default_backend() != "cpu" or not library.available(), reason="needs the native CPU kernels"),
)
"""The native implementation, where it can run."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}


@functools.cache
def jitted(implementation: str, decode: bool, static: tuple[tuple[str, object], ...]):
    """The operation under jit with these static options; one object per combination, so that equal shapes compile once."""

    @jax.jit
    def call(q, k, v, tables, lengths, num_queries, arrays):
        return pallas_kernels.paged_attention(
            q[:, 0] if decode else q, k, v, tables, lengths, num_queries=None if decode else num_queries,
            return_lse=True, implementation=implementation, **dict(static), **arrays,
        )  # fmt: skip

    return call


def run(case: Case, implementation: str, **more) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of the operation under jit, 3-D where the case has one query per row and all are live or dead by length."""
    options = case.options | more
    static = tuple((k, v) for k, v in options.items() if not isinstance(v, np.ndarray))
    arrays = {k: jnp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}
    decode = case.q.shape[1] == 1 and bool((case.num_queries == np.minimum(case.lengths, 1)).all())
    fields = (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)
    out, lse = jitted(implementation, decode, static)(*map(jnp.asarray, fields), arrays)
    assert out.dtype == case.q.dtype and lse.dtype == jnp.float32
    out, lse = np.asarray(out), np.asarray(lse)
    return (out[:, None], lse[:, None]) if decode else (out, lse)


def check(case: Case, implementation: str, **more) -> None:
    """Asserts that the operation agrees with the oracle, to the rounding of the case's dtype."""
    check_results(case, *run(case, implementation, **more))


def check_results(case: Case, out: np.ndarray, lse: np.ndarray) -> None:
    """Asserts that results agree with the oracle, to the rounding of the case's dtype."""
    want, want_lse = dense_attention(case)
    dead = np.isneginf(want_lse)
    assert (np.isneginf(lse) == dead).all(), "dead queries have lse -inf, and only they"
    assert (out[dead] == 0).all(), "dead queries are exactly 0"
    assert np.isfinite(out.astype(np.float64)).all(), "no NaN or overflow reaches the output"
    name = case.q.dtype.name
    size = max(1.0, float(np.abs(want).max(initial=0.0)))
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=TOLERANCE[name] * size)
    np.testing.assert_allclose(lse[~dead], want_lse[~dead], rtol=1e-5, atol=1e-5)
