"""The product for one or two narrow rows on CPU with jaxlib 0.11 and later: a loop of the compiler's own over slices of the weight.

From 0.11 on XLA fuses the slices into one pass over each row of the weight, which reads faster than the library does; before, it cuts
each slice out first (docs/measurements.md, "One and two bfloat16 rows on jaxlib 0.12").
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.product_weight_left import rows_in_front

LANES = 64
"""Sums kept side by side for all rows together."""


def lanes_refusal(rows: int, width: int) -> str | None:
    """Why rows of so many numbers cannot be summed so, or None."""
    if rows > LANES or width % (LANES // rows):
        return (
            f"it takes at most {LANES} rows whose number of inputs is a multiple of {LANES} // rows, got {rows} rows of {width}"
        )
    return None


def product_sums_in_lanes(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out] in x's dtype, summed in float32: first every lanes-th product, side by side."""
    lanes = LANES // x.shape[0]
    # The barrier keeps a loop around this from converting all narrow weights to float32 in front of it, and reading those.
    flat, rows = lax.optimization_barrier((weight.reshape(-1, weight.shape[-1]), x))
    cut = lambda y, i: y[:, i : i + lanes].astype(jnp.float32)
    products = (cut(flat, i)[:, None] * cut(rows, i)[None] for i in range(0, x.shape[1], lanes))
    y = jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, products)), axis=-1)
    return rows_in_front(y, x).reshape(x.shape[0], *weight.shape[:-1])
