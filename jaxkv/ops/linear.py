"""Activations times weights, as layers use them: with a bias, and for whatever a layer keeps as its weight."""

import jax
from jaxtyping import Array, Float

import pallas_kernels


def times(
    x: Float[Array, "tokens in"], weight: Array, *, deterministic: bool = False, implementation: str | None = None
) -> jax.Array:
    """x times the transposed weight: the one place that knows what a weight may be."""
    return pallas_kernels.product(x, weight, deterministic=deterministic, implementation=implementation)


def linear(
    x: Float[Array, "tokens in"],
    weight: Array,
    bias: Array | None = None,
    *,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Array:
    """x times the transposed weight, plus the bias.

    Args:
      x: inputs, of the weight's dtype.
      weight: `[*out, in]`; any number of output axes.
      bias: `[*out]` or None.
      deterministic: compute in fixed row tiles; a row's bits then do not depend on the number of tokens.
      implementation: of the product, see `pallas_kernels.product`.

    Returns:
      `[tokens, *out]` in x's dtype.

    Raises:
      ValueError, NotImplementedError: as `pallas_kernels.product`.
    """
    y = times(x, weight, deterministic=deterministic, implementation=implementation)
    return y if bias is None else y + bias[None]
