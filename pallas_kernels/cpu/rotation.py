"""Rotation of queries and keys by the native kernels, in the pass that splits them from each other."""

from __future__ import annotations

import jax

from pallas_kernels.cpu import library


def split_rotated_cpu(qkv: jax.Array, cos: jax.Array, sin: jax.Array, target: str | None = None) -> list[jax.Array]:
    """What `pallas_kernels.split_rotated` returns.

    Args:
      qkv: [tokens, kv_heads, q_per_kv + 2, head_dim], float32, bfloat16 or float16.
      cos, sin: f32[tokens, half].
      target: one of the library's targets; None is the one in use. For tests.
    """
    tokens, kv_heads, group, head_dim = qkv.shape
    shapes = ((tokens, kv_heads * (group - 2), head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, head_dim))
    results = [jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in shapes]
    return library.call("rotation", results, qkv, cos, sin, target=target)
