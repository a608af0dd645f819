"""The pages of one layer, the unit in which the cache's contents pass through a model."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class Pages(NamedTuple):
    """One layer's pages, each `[num_pages, kv_heads, page_size, head_dim]`."""

    k: Array
    v: Array


def copied(pages: Array, old: Array, new: Array) -> Array:
    """One layer's keys or values with pages `old` written over pages `new`, i32[n] both.

    Narrow floats go as integers: XLA on CPU turns a bfloat16 scatter into one of float32, and so converts the whole pool there
    and back.
    """
    dtype = pages.dtype
    bits = lax.bitcast_convert_type(pages, {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype))
    return lax.bitcast_convert_type(bits.at[new].set(bits[old]), dtype)
