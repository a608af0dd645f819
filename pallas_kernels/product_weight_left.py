"""The product for XLA on CPU, the weight on the left: as the right operand XLA repacks all of it at every call.

The measurements are in docs/measurements.md, "Weight on the left".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rows_in_front(y: jax.Array, like: jax.Array) -> jax.Array:
    """f32[*out, rows] -> [rows, *out] of `like`, [rows, in], in its dtype.

    Without the barrier XLA folds the transpose into the product, and swaps its operands back.
    """
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0)[: like.shape[0]].astype(like.dtype)


def product_weight_left(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out] in x's dtype, summed in float32.

    A bfloat16 product is asked for float32: asked for bfloat16, jaxlib 0.10.2 may convert the whole weight first. A single bfloat16 row
    is made two, because XLA takes a scalar path for one.
    """
    several = jnp.concatenate([x, x]) if x.dtype == jnp.bfloat16 and x.shape[0] == 1 else x
    dims = (((weight.ndim - 1,), (1,)), ((), ()))
    return rows_in_front(lax.dot_general(weight, several, dims, preferred_element_type=jnp.float32), x)
