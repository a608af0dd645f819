"""The deterministic product, one tile of rows after the other: every tile reads the weight again."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.row_tiles import TILE, in_turn

FLOAT32_TILE = 16
"""Rows of one float32 tile (docs/measurements.md, "Size of a tile")."""


def tile_rows(dtype: jax.typing.DTypeLike) -> int:
    """Rows of one tile of activations of this dtype."""
    return FLOAT32_TILE if jax.numpy.dtype(dtype) == jax.numpy.float32 else TILE


def product_tiles_in_turn(x: jax.Array, weight: jax.Array, product: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out] in x's dtype, each tile by `product`."""
    return in_turn(product, tile_rows(x.dtype), (x,), (weight,))
