"""New keys and values into their slots of the page pool by the native kernels: in place, and of every dtype the bytes as they are."""

from __future__ import annotations

import jax

from pallas_kernels.cpu import library
from pallas_kernels.quantization import quantize


def write_pages_cpu(pools: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array) -> tuple[jax.Array, ...]:
    """The pools with the new vectors in their slots; the arguments and results of `write_pages_xla`.

    The results take the pools' memory. Where somebody else reads a pool later, XLA copies it first.
    """
    new = (k.astype(pools[0].dtype), v.astype(pools[1].dtype))
    if len(pools) == 4:
        (k, k_scale), (v, v_scale) = quantize(k, pools[0].dtype), quantize(v, pools[1].dtype)
        new = (k, v, k_scale, v_scale)
    types = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    return tuple(library.call("write_pages", types, *pools, *new, slots, aliases={i: i for i in range(len(pools))}))
