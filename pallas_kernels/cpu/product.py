"""Activations times weights by the native kernels."""

from __future__ import annotations

import math

import jax

from pallas_kernels.cpu import library


def product_cpu(x: jax.Array, weight: jax.Array, live: jax.Array | None = None, *, target: str | None = None) -> jax.Array:
    """x times the transposed weight, summed in float32.

    The order of an element's sum depends on processor, dtype and width alone: a row has the same bits whatever stands beside it.

    Args:
      x: [rows, in], float32, bfloat16 or float16.
      weight: [*out, in] in x's dtype, read as it lies.
      live: bool[rows], or None for all; the others are not computed, and cost nothing but their zeros.
      target: one of `library.load().targets`; None is the one in use. For tests.

    Returns:
      [rows, *out] in x's dtype; zeros for rows that are not live.
    """
    outputs = math.prod(weight.shape[:-1])
    flat = jax.ShapeDtypeStruct((x.shape[0], outputs), x.dtype)
    handler, arrays = ("product", ()) if live is None else ("product_of_live", (live,))
    (y,) = library.call(handler, [flat], x, weight, *arrays, target=target)
    return y.reshape(x.shape[0], *weight.shape[:-1])
