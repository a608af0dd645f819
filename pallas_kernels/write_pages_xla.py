"""New keys and values into their slots of the page pool in plain XLA: one scatter a pool, in place when the caller donates it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import options as opts
from pallas_kernels.quantization import quantize

WIDENED_ON_CPU = ("float8_e4m3fn", "float8_e5m2") + (("bfloat16",) if jax.__version_info__ < (0, 11) else ())
"""On CPU, XLA converts a whole pool of these dtypes there and back for a scatter. Scattering their bits costs two plain copies of the pool
instead, which is far less; other dtypes cost none (docs/measurements.md, "Scatter of bfloat16 pages")."""


def _put(pool: jax.Array, values: jax.Array, slots: jax.Array, as_bits: bool) -> jax.Array:
    """The pool [num_pages, kv_heads, page_size, *features] with values [tokens, kv_heads, *features] in their slots."""
    features = pool.shape[3:]

    def scatter(pool: jax.Array, values: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *features)
        return flat.at[slots].set(values.reshape(-1, *features), mode="drop").reshape(pool.shape)

    values = values.astype(pool.dtype)
    if not as_bits:
        return scatter(pool, values)
    bits = opts.bits_of(pool.dtype)
    pool_bits, value_bits = (lax.bitcast_convert_type(x, bits) for x in (pool, values))
    return lax.bitcast_convert_type(scatter(pool_bits, value_bits), pool.dtype)


def write_pages_xla(
    pools: tuple[jax.Array, ...], k: jax.Array, v: jax.Array, slots: jax.Array, *, on_cpu: bool = False
) -> tuple[jax.Array, ...]:
    """The pools with the new vectors in their slots; the arguments and results of `write_pages_triton`.

    Args:
      on_cpu: the program is for a CPU; its values are the same, but it has no derivative then.
    """
    new = (k, v)
    if len(pools) == 4:
        (k, k_scale), (v, v_scale) = quantize(k, pools[0].dtype), quantize(v, pools[1].dtype)
        new = (k, v, k_scale, v_scale)
    as_bits = [on_cpu and jnp.dtype(pool.dtype).name in WIDENED_ON_CPU for pool in pools]
    return tuple(_put(pool, values, slots, bits) for pool, values, bits in zip(pools, new, as_bits))
