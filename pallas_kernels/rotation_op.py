"""Queries, keys and values out of one product, the first two rotated: the public operation checks and carries the derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.choice import runs_natively
from pallas_kernels.dispatch import Place, broadcast, make_operation
from pallas_kernels.options import FLOAT_DTYPES
from pallas_kernels.rotation_xla import split_rotated_xla

IMPLEMENTATIONS = ("xla", "cpu")


def _run(place: Place, qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, implementation: str | None) -> list[jax.Array]:
    if not runs_natively(implementation, place):
        return split_rotated_xla(qkv, cos, sin)
    from pallas_kernels.cpu.rotation import split_rotated_cpu

    return split_rotated_cpu(qkv, cos, sin)


def _results(
    qkv: jax.ShapeDtypeStruct, cos: jax.ShapeDtypeStruct, sin: jax.ShapeDtypeStruct, **static
) -> list[jax.ShapeDtypeStruct]:
    tokens, kv_heads, group, head_dim = qkv.shape
    heads = (kv_heads * (group - 2), kv_heads, kv_heads)
    return [jax.ShapeDtypeStruct((tokens, n, head_dim), qkv.dtype) for n in heads]


def _batch(operation: Callable, size: int, arrays: list, batched: list[bool], **static) -> list[jax.Array]:
    """The batch becomes more tokens."""
    wide = broadcast(size, arrays, batched)
    out = operation(*(x.reshape(-1, *x.shape[2:]) for x in wide), **static)
    return [x.reshape(size, -1, *x.shape[1:]) for x in out]


_operation = make_operation("split_rotated", run=_run, results=_results, batch=_batch)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _split_rotated(qkv: jax.Array, cos: jax.Array, sin: jax.Array, implementation: str | None) -> list[jax.Array]:
    return list(_operation(qkv, cos, sin, implementation=implementation))


@_split_rotated.defjvp
def _tangent(implementation: str | None, primals: tuple, tangents: tuple) -> tuple:
    """Values by the implementation chosen, derivatives of XLA's form."""
    return _split_rotated(*primals, implementation), jax.jvp(split_rotated_xla, primals, tangents)[1]


def split_rotated(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits what one product gives into queries, keys and values, and turns the first two by each token's rotary angles.

    The leading 2 * half dimensions of each head are turned, dimension i with dimension i + half (Hugging Face's layout), in float32; the
    others stay. Works under `jax.jit`, `jax.vmap`, and `jax.grad` of any order.

    Args:
      qkv: [tokens, kv_heads, q_per_kv + 2, head_dim], float32, bfloat16 or float16: of each kv head its query heads, its key, its value.
      cos, sin: f32[tokens, half], of each token's angles.
      implementation: None for the best one of the platform that the program is lowered for: "cpu", one pass of the native kernels, on a CPU
        where they are built, else "xla".

    Returns:
      q [tokens, kv_heads * q_per_kv, head_dim], k and v [tokens, kv_heads, head_dim], in qkv's dtype.

    Raises:
      ValueError: a shape or dtype is wrong, or the name is unknown.
      NotImplementedError: the implementation asked for by name cannot run where the program is lowered for; the message says why.
    """
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(f"qkv must be [tokens, kv_heads, q_per_kv + 2, head_dim], got shape {qkv.shape}")
    if jnp.dtype(qkv.dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"qkv must be one of {FLOAT_DTYPES}, got {qkv.dtype}")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, got {x.dtype}")
        if x.ndim != 2 or x.shape != cos.shape or x.shape[0] != qkv.shape[0] or 2 * x.shape[1] > qkv.shape[3]:
            raise ValueError(
                f"{name} must be [tokens = {qkv.shape[0]}, half <= {qkv.shape[3] // 2}], both alike, got shape {x.shape}"
            )
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if 0 in qkv.shape or 0 in cos.shape:
        q, k, v = split_rotated_xla(qkv, cos, sin)
    else:
        q, k, v = _split_rotated(qkv, cos, sin, implementation)
    return q, k, v
