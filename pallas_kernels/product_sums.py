"""The product for few rows on CPU, as a sum of products: XLA hands it to the library that does its matrix products, which cuts it better.

The measurements are in docs/measurements.md, "Sum of products for few rows".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.product_weight_left import rows_in_front


def product_sums(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out] in x's dtype, summed in float32.

    The weight's output axes are flattened: the library knows the sum with one of them only.
    """
    # The barrier keeps a loop around this from converting all narrow weights to float32 in front of it, and reading those.
    flat, rows = lax.optimization_barrier((weight.reshape(-1, weight.shape[-1]), x))
    w, rows = flat.astype(jnp.float32), rows.astype(jnp.float32)
    if x.shape[0] == 1:
        y = jnp.sum(w * rows, axis=1, keepdims=True)
    else:
        y = jnp.sum(w[:, None, :] * rows[None, :, :], axis=-1)
    return rows_in_front(y, x).reshape(x.shape[0], *weight.shape[:-1])
