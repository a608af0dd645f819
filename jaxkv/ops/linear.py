"""Activations times weights, as layers use them: with a bias, and for whatever a layer keeps as its weight."""

from jaxtyping import Array, Bool, Float

import pallas_kernels
from jaxkv.ops.numerics import DEFAULT, Numerics


def times(x: Float[Array, "tokens in"], weight: Array, numerics: Numerics, live: Bool[Array, " tokens"] | None = None) -> Array:
    """x times the transposed weight: the one place that knows what a weight may be."""
    return pallas_kernels.product(x, weight, live=live, deterministic=numerics.deterministic, implementation=numerics.product)


def linear(
    x: Float[Array, "tokens in"],
    weight: Array,
    bias: Array | None = None,
    numerics: Numerics = DEFAULT,
    live: Bool[Array, " tokens"] | None = None,
) -> Array:
    """x times the transposed weight, plus the bias.

    Args:
      x: inputs, of the weight's dtype.
      weight: `[*out, in]`; any number of output axes.
      bias: `[*out]` or None.
      numerics: how it is computed.
      live: the tokens whose results are needed, or None for all; those of the others mean nothing.

    Returns:
      `[tokens, *out]` in x's dtype.

    Raises:
      ValueError, NotImplementedError: as `pallas_kernels.product`.
    """
    y = times(x, weight, numerics, live)
    return y if bias is None else y + bias[None]
