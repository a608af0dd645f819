"""The deterministic float32 product on CPU, tiles of rows side by side: one sum of products with an axis of tiles reads the weight once.

A tile's bits are those of a tile alone, which the tests check: how many tiles there are does not change how the library cuts one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.product_tiles_in_turn import FLOAT32_TILE
from pallas_kernels.row_tiles import padded, unfused

WEIGHTS_IN_BLOCKS, BLOCK = jax.__version_info__ >= (0, 11), 64
"""Many tiles go over the weight in blocks of so many rows from jaxlib 0.11 on, whose library does not cut it so by itself; with 0.10.2
that is far slower (docs/measurements.md, "Tiles side by side")."""


def side_by_side_refusal(dtype: jax.typing.DTypeLike, outputs: int) -> str | None:
    """Why tiles of this dtype by a weight of so many outputs cannot stand side by side, or None."""
    if jnp.dtype(dtype) != jnp.float32 or outputs < 2:
        return f"it takes float32 and a weight of at least two outputs, got {jnp.dtype(dtype).name} and {outputs}; use 'tiles_in_turn'"
    return None


def product_tiles_side_by_side(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [rows, in], weight [*out, in] -> [rows, *out], both float32.

    A single tile has no axis of tiles: jaxlib 0.10.2 gives wrong numbers where that has the length one.
    """
    flat = weight.reshape(-1, weight.shape[-1])
    tiles = padded(x, FLOAT32_TILE).reshape(-1, FLOAT32_TILE, x.shape[1])
    if tiles.shape[0] == 1:
        y = unfused(lambda tile, weight: jnp.sum(weight[:, None, :] * tile[None], axis=-1).T, tiles[0], flat)
    elif WEIGHTS_IN_BLOCKS and flat.shape[0] % BLOCK == 0:
        blocks = flat.reshape(-1, BLOCK, flat.shape[1])
        many = lambda tiles, blocks: jnp.sum(blocks[:, None, :, None, :] * tiles[None, :, None], axis=-1).transpose(1, 3, 0, 2)
        y = unfused(many, tiles, blocks)
    else:
        many = lambda tiles, weight: jnp.sum(weight[None, :, None, :] * tiles[:, None], axis=-1).swapaxes(1, 2)
        y = unfused(many, tiles, flat)
    return y.reshape(-1, flat.shape[0])[: x.shape[0]].reshape(x.shape[0], *weight.shape[:-1])
