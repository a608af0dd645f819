"""Rotation of queries and keys in plain XLA: the form for other platforms, the derivative and the oracle of the native one."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [tokens, heads, head_dim] with the leading 2 * half dimensions of each head turned, dimension i with i + half; in x's dtype.

    Args:
      cos, sin: f32[tokens, half].
    """
    cos, sin = (t[:, None, None, :] for t in (cos, sin))
    half = cos.shape[-1]
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], 2, half).astype(jnp.float32)
    # The other number of each pair comes from reversing an axis: XLA on CPU would copy two concatenated halves number by number.
    turned = pairs * cos + pairs[..., ::-1, :] * jnp.concatenate([-sin, sin], axis=-2)
    turned = turned.astype(x.dtype).reshape(*x.shape[:-1], 2 * half)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def split(qkv: jax.Array) -> list[jax.Array]:
    """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] of qkv [tokens, kv_heads, q_per_kv + 2, head_dim]."""
    tokens, _, group, head_dim = qkv.shape
    return [qkv[:, :, : group - 2].reshape(tokens, -1, head_dim), qkv[:, :, group - 2], qkv[:, :, group - 1]]


def split_rotated_xla(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    """What `pallas_kernels.split_rotated` returns."""
    q, k, v = split(qkv)
    return [rotate(q, cos, sin), rotate(k, cos, sin), v]
