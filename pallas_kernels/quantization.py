"""Keys and values as one byte a number and one scale a vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest magnitude of each dtype that pages may be quantized to."""


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Symmetric quantization of each vector along the last axis.

    Args:
      x: [..., head_dim] floating.
      dtype: int8, float8_e4m3fn or float8_e5m2.

    Returns:
      values [..., head_dim] in dtype and scale f32[...] with x ~ values * scale; the largest magnitude maps to the dtype's
      largest value, and a vector of zeros has scale 1.
    """
    largest = LARGEST[jnp.dtype(dtype).name]
    wide = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(peak > 0, peak / largest, 1.0)
    values = jnp.clip(wide / scale[..., None], -largest, largest)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), scale
