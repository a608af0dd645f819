"""New keys and values into their slots of the page pool: the public operation checks, and picks the implementation when it is lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import options as opts
from pallas_kernels.choice import check_name, choose
from pallas_kernels.dispatch import Place, broadcast, make_operation
from pallas_kernels.gpu import named_capability
from pallas_kernels.write_pages_xla import write_pages_xla


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


def _run(place: Place, *arrays: jax.Array, implementation: str | None, capability: str | None) -> tuple[jax.Array, ...]:
    *pools, k, v, slots = arrays
    name, _ = choose(implementation, place, capability, pools[0].shape, pools[0].dtype, writing=True)
    if name == "xla":
        return write_pages_xla(tuple(pools), k, v, slots, on_cpu=place.platform == "cpu")
    if name == "cpu":
        from pallas_kernels.cpu.write_pages import write_pages_cpu

        return write_pages_cpu(tuple(pools), k, v, slots)
    from pallas_kernels.write_pages_triton import write_pages_triton

    return write_pages_triton(tuple(pools), k, v, slots, interpret=name.endswith("_interpret"))


def _results(*types: jax.ShapeDtypeStruct, **static) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in types[:-3]]


def _batch(operation: Callable, size: int, arrays: list, batched: list[bool], **static) -> list[jax.Array]:
    """Every element of the batch has pools of its own then: they stand one behind the other, and the slots point into them."""
    *pools, k, v, slots = broadcast(size, arrays, batched)
    per_pool = pools[0].shape[1] * pools[0].shape[2] * pools[0].shape[3]
    if size * per_pool > opts.INT32_MAX:
        raise ValueError(
            f"a batch of pools may have at most 2**31 - 1 (page, head, token) slots together, got {size * per_pool}"
        )
    slots = jnp.where(slots < per_pool, slots + lax.iota(jnp.int32, size)[:, None] * per_pool, opts.INT32_MAX)
    out = operation(*(x.reshape(-1, *x.shape[2:]) for x in (*pools, k, v, slots)), **static)
    return [new.reshape(pool.shape) for new, pool in zip(out, pools)]


_operation = make_operation("write_pages", run=_run, results=_results, batch=_batch)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _write(
    pools: tuple, k: jax.Array, v: jax.Array, slots: jax.Array, implementation: str | None, capability: str | None
) -> tuple[jax.Array, ...]:
    return tuple(_operation(*pools, k, v, slots, implementation=implementation, capability=capability))


@_write.defjvp
def _write_tangent(implementation: str | None, capability: str | None, primals: tuple, tangents: tuple) -> tuple:
    """Values by the implementation chosen, derivatives of the plain scatter."""
    return _write(*primals, implementation, capability), jax.jvp(write_pages_xla, primals, tangents)[1]


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
      implementation: as of `paged_attention`: "xla", "cpu", "triton", "mosaic", "triton_interpret", "mosaic_interpret", or None for the
        best one of the platform that the program is lowered for. There is one GPU writer, Triton's, which also goes with "mosaic".

    Returns:
      (k_pages, v_pages), or (k_pages, v_pages, k_scales, v_scales) with quantized pages.

    Raises:
      ValueError: a shape or dtype is wrong.
      NotImplementedError: the implementation asked for by name cannot run on the platform that is lowered for, or cannot take such pages.
    """
    opts.check_pages(k_pages, v_pages, k_scales, v_scales)
    opts.check_writes(k_pages, k, v, pages, offsets)
    check_name(implementation, k_pages.shape, k_pages.dtype, writing=True)
    slots = slot_indices(k_pages.shape, pages, offsets)
    pools = (k_pages, v_pages) if k_scales is None or v_scales is None else (k_pages, v_pages, k_scales, v_scales)
    if 0 in k.shape:
        return pools
    return cast(tuple[jax.Array, ...], _write(pools, k, v, slots, implementation, named_capability()))
