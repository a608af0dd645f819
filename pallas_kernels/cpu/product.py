"""Activations times weights by the native kernels."""

from __future__ import annotations

import math

import jax

from pallas_kernels.cpu import library


def product_cpu(x: jax.Array, weight: jax.Array, target: str | None = None) -> jax.Array:
    """x times the transposed weight, summed in float32.

    The order of an element's sum depends on processor, dtype and width alone: a row has the same bits whatever stands beside it.

    Args:
      x: [rows, in], float32, bfloat16 or float16.
      weight: [*out, in] in x's dtype, read as it lies.
      target: one of `library.load().targets`; None is the one in use. For tests.

    Returns:
      [rows, *out] in x's dtype.
    """
    outputs = math.prod(weight.shape[:-1])
    flat = jax.ShapeDtypeStruct((x.shape[0], outputs), x.dtype)
    (y,) = library.call("product", [flat], x, weight, target=target)
    return y.reshape(x.shape[0], *weight.shape[:-1])
