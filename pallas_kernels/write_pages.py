"""New keys and values into their slots of the page pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import options as opts

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Symmetric quantization of each vector along the last axis.

    Args:
      x: [..., head_dim] floating.
      dtype: int8, float8_e4m3fn or float8_e5m2.

    Returns:
      values [..., head_dim] in dtype and scale f32[...] with x ~ values * scale; the largest magnitude maps to the dtype's
      largest value, and a vector of zeros has scale 1.
    """
    largest = _LARGEST[jnp.dtype(dtype).name]
    wide = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(peak > 0, peak / largest, 1.0)
    values = jnp.clip(wide / scale[..., None], -largest, largest)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), scale


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
) -> tuple[jax.Array, ...]:
    """Writes one key and one value per token and kv head; in place when the caller donates the pool.

    Args:
      k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim].
      k, v: [tokens, kv_heads, head_dim] floating; cast to the pages' dtype, or quantized per token and head.
      pages: i32[tokens], the page of each token; 0 (the null page) or anything out of range: the token is dropped.
      offsets: i32[tokens] in [0, page_size), the slot within the page. No live slot may be named twice.
      k_scales, v_scales: f32[num_pages, kv_heads, page_size], with quantized pages only; written too.

    Returns:
      (k_pages, v_pages), or (k_pages, v_pages, k_scales, v_scales) with quantized pages.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    opts.check_pages(k_pages, v_pages, k_scales, v_scales)
    opts.check_writes(k_pages, k, v, pages, offsets)
    num_pages, kv_heads, page_size, head_dim = k_pages.shape
    live = (pages > 0) & (pages < num_pages) & (offsets >= 0) & (offsets < page_size)
    head = jnp.arange(kv_heads, dtype=jnp.int32)
    slots = (pages[:, None] * kv_heads + head[None, :]) * page_size + offsets[:, None]
    slots = jnp.where(live[:, None], slots, opts.INT32_MAX).reshape(-1)

    def put(pool, values, features):
        flat = pool.reshape(-1, *features)
        values = values.reshape(-1, *features).astype(pool.dtype)
        return flat.at[slots].set(values, mode="drop").reshape(pool.shape)

    if k_scales is None or v_scales is None:
        return put(k_pages, k, (head_dim,)), put(v_pages, v, (head_dim,))
    (k_low, k_scale), (v_low, v_scale) = quantize(k, k_pages.dtype), quantize(v, v_pages.dtype)
    return (
        put(k_pages, k_low, (head_dim,)),
        put(v_pages, v_low, (head_dim,)),
        put(k_scales, k_scale, ()),
        put(v_scales, v_scale, ()),
    )
