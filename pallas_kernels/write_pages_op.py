"""New keys and values into their slots of the page pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import options as opts
from pallas_kernels.dispatch import choose_implementation
from pallas_kernels.paged_attention_triton import check_offsets
from pallas_kernels.write_pages_triton import LARGEST, write_pages_triton

# On CPU, XLA widens a scatter into these dtypes, pool and all, there and back (measured: 90 ms for 25 MB of bfloat16, jaxlib
# 0.10.2; fp8 also in 0.12). Scattering their bits costs two plain copies of the pool instead (2.5 ms); other dtypes none.
_WIDENED_ON_CPU = ("float8_e4m3fn", "float8_e5m2") + (("bfloat16",) if jax.__version_info__ < (0, 11) else ())


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


def slot_indices(shape: tuple[int, ...], pages: jax.Array, offsets: jax.Array) -> jax.Array:
    """i32[tokens * kv_heads]: row of each new vector in the pool seen as [slots, head_dim]; 2**31 - 1 for a dead token.

    `check_pages` has made sure that every row of the pool fits int32; element offsets, which may not, are never formed.
    """
    num_pages, kv_heads, page_size, _ = shape
    live = (pages > 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    pages, offsets = jnp.where(live, pages, 0), jnp.where(live, offsets, 0)
    head = lax.iota(jnp.int32, kv_heads)
    slots = (pages[:, None] * kv_heads + head[None, :]) * page_size + offsets[:, None]
    return jnp.where(live[:, None], slots, opts.INT32_MAX).reshape(-1)


def _put(pool: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
    """The pool [num_pages, kv_heads, page_size, *features] with values [tokens, kv_heads, *features] in their slots."""
    features = pool.shape[3:]

    def scatter(pool, values):
        flat = pool.reshape(-1, *features)
        return flat.at[slots].set(values.reshape(-1, *features), mode="drop").reshape(pool.shape)

    def scatter_bits(pool, values):
        bits = opts.bits_of(pool.dtype)
        pool_bits, value_bits = (lax.bitcast_convert_type(x, bits) for x in (pool, values))
        return lax.bitcast_convert_type(scatter(pool_bits, value_bits), pool.dtype)

    values = values.astype(pool.dtype)
    if jnp.dtype(pool.dtype).name in _WIDENED_ON_CPU:
        return lax.platform_dependent(pool, values, cpu=scatter_bits, default=scatter)
    return scatter(pool, values)


def write_pages(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Writes one key and one value per token and kv head; in place when the caller donates the pool.

    Args:
      k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim].
      k, v: [tokens, kv_heads, head_dim] floating; cast to the pages' dtype, or quantized per token and head.
      pages: i32[tokens], the page of each token; 0 (the null page) or anything out of range: the token is dropped.
      offsets: i32[tokens] in [0, page_size), the slot within the page. No live slot may be named twice.
      k_scales, v_scales: f32[num_pages, kv_heads, page_size], with quantized pages only; written too.
      implementation: "xla", "triton", "triton_interpret", or None for the best one of the default platform.

    Returns:
      (k_pages, v_pages), or (k_pages, v_pages, k_scales, v_scales) with quantized pages.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the implementation asked for by name cannot run here.
    """
    opts.check_pages(k_pages, v_pages, k_scales, v_scales)
    opts.check_writes(k_pages, k, v, pages, offsets)
    slots = slot_indices(k_pages.shape, pages, offsets)
    pools = (k_pages, v_pages) if k_scales is None or v_scales is None else (k_pages, v_pages, k_scales, v_scales)
    if implementation is not None and implementation.startswith("mosaic"):
        raise NotImplementedError(f"write_pages has no {implementation!r} implementation; use 'triton' or 'xla'")
    name = choose_implementation(implementation, k_pages.shape, k_pages.dtype)
    if name.startswith("triton"):
        check_offsets(k_pages.shape, k_pages.dtype.itemsize)
        return write_pages_triton(pools, k, v, slots, interpret=name == "triton_interpret")
    new = (k, v)
    if len(pools) == 4:
        (k, k_scale), (v, v_scale) = quantize(k, k_pages.dtype), quantize(v, v_pages.dtype)
        new = (k, v, k_scale, v_scale)
    return tuple(_put(pool, values, slots) for pool, values in zip(pools, new))
