"""The product as GPU and TPU compilers like it, and as CPUs do for many rows: activations on the left, the weight on the right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def product_weight_right(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out] in x's dtype, summed in float32. The weight keeps its axes, so that none that is
    divided over a mesh is flattened."""
    dims = (((1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32).astype(x.dtype)
