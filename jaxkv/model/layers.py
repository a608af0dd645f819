"""The parts of a decoder layer: norms, rotary positions, MLP.

Everything here works on a flat list of tokens, `[tokens, ...]`; which tokens belong to one sequence is known to attention alone.
Weights keep Hugging Face's `[out, in]` orientation. Matrices that read the same input are stored as one array, so that a
step reads them with one product: `qkv` is `[kv_heads, q_per_kv + 2, head_dim, in]` (each kv head's queries, then its key, then
its value: splitting kv_heads over devices cuts no head apart), `gate_up` is `[2, intermediate, in]`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.config import Activation, ModelConfig, Rope
from jaxkv.ops.linear import linear
from pallas_kernels.row_tiles import in_row_tiles, unfused


def value(param: Any) -> Array:
    """The array inside an nnx parameter."""
    return param[...]


def optional(param: Any) -> Array | None:
    """The array inside an nnx parameter, or None where the model has none."""
    return None if param is None else param[...]


def new_param(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: str, std: float | None = 0.02) -> nnx.Param:
    """A parameter of normal noise of standard deviation `std`, or of zeros where it or `rngs` is None."""
    if std is None or rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(std, dtype))


class Norm(nnx.Module):
    """RMS or layer normalisation over the last axis, computed in float32, returned in x's dtype."""

    def __init__(self, kind: str, size: int, *, eps: float, plus_one: bool, dtype: str):
        self.kind, self.eps, self.plus_one = kind, eps, plus_one
        self.weight = nnx.Param(jnp.zeros(size, dtype) if plus_one else jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if kind == "layer" else None

    def __call__(self, x: Float[Array, "*rows size"], *, deterministic: bool = False) -> Float[Array, "*rows size"]:
        """Normalise the last axis; `deterministic` as in `linear`."""
        kind = functools.partial(normalise, self.kind, self.eps, self.plus_one)
        flat, weights = x.reshape(-1, x.shape[-1]), (value(self.weight),)
        if self.bias is not None:
            weights = (*weights, value(self.bias))
        y = in_row_tiles(kind, (flat,), weights) if deterministic else kind(flat, *weights)
        return y.reshape(x.shape)


def normalise(kind: str, eps: float, plus_one: bool, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """What `Norm` computes, for x [rows, size]."""
    y = x.astype(jnp.float32)
    if kind == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32)[None]
    y = y * (weight + 1.0 if plus_one else weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.astype(x.dtype)


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Angle per position of each rotated pair of dimensions, float32 [rotary_dim / 2]; "dynamic" before its rescaling.

    Source: the formulas of transformers' `modeling_rope_utils` (linear, llama3, yarn), themselves from the papers they name.
    """
    pairs = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / rope.rotary_dim
    freq = (1.0 / np.power(np.float32(rope.theta), pairs)).astype(np.float32)
    if rope.kind == "linear":
        return freq / np.float32(rope.factor)
    if rope.kind == "llama3":
        turns = rope.original_max_seq_len * freq / (2 * np.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0).astype(np.float32)
        return freq * keep + freq / np.float32(rope.factor) * (1 - keep)
    if rope.kind == "yarn":

        def pair_with(turns: float) -> float:  # the (fractional) pair that makes this many turns over the original context
            wave = rope.original_max_seq_len / (turns * 2 * np.pi)
            return rope.rotary_dim * np.log(wave) / (2 * np.log(rope.theta))

        low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
        if rope.truncate:
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / (high - low if high > low else 0.001)
        keep = 1 - np.clip(ramp, 0.0, 1.0).astype(np.float32)
        return freq * keep + freq / np.float32(rope.factor) * (1 - keep)
    return freq


def rotary_tables(
    rope: Rope, positions: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """cos and sin of each token's angles, float32, attention factor included.

    With dynamic scaling a token at position p turns by the frequencies of a context of max(p + 1, original) tokens: those
    in force when it was decoded, so that its key never depends on what comes later.
    """
    freq = jnp.asarray(inverse_frequencies(rope))[None, :]
    if rope.kind == "dynamic":
        length = jnp.maximum(positions + 1, rope.original_max_seq_len).astype(jnp.float32)
        grown = rope.factor * length / rope.original_max_seq_len - (rope.factor - 1)
        base = rope.theta * grown ** (rope.rotary_dim / (rope.rotary_dim - 2))
        pairs = jnp.arange(0, rope.rotary_dim, 2, dtype=jnp.float32) / rope.rotary_dim
        freq = 1.0 / (base[:, None] ** pairs[None, :])
    angles = positions.astype(jnp.float32)[:, None] * freq
    # Apart, or XLA on CPU computes cosine and sine again for every head of every layer (9.5 ms of rotation a chunk, not 2.4).
    cos, sin = unfused(lambda a: jnp.stack([jnp.cos(a), jnp.sin(a)]) * rope.attention_factor, angles)
    return cos, sin


def rotate(x: Float[Array, "tokens heads head_dim"], tables: tuple[Array, Array]) -> Float[Array, "tokens heads head_dim"]:
    """Turn the leading 2 * half dimensions of each head: dimension i with dimension i + half (Hugging Face's layout)."""
    cos, sin = (t[:, None, None, :] for t in tables)
    half = cos.shape[-1]
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], 2, half).astype(jnp.float32)
    # The other of each pair by reversing an axis: two halves put together again would be copied number by number on CPU.
    turned = pairs * cos + pairs[..., ::-1, :] * jnp.concatenate([-sin, sin], axis=-2)
    turned = turned.astype(x.dtype).reshape(*x.shape[:-1], 2 * half)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def activate(name: Activation, x: Array) -> Array:
    """Apply an activation by its configuration name."""
    return _ACTIVATIONS[name](x)


class MLP(nnx.Module):
    """The feed-forward half of a layer: `down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None):
        c = config
        self.config = c
        up = (2, c.intermediate_size) if c.mlp == "gated" else (c.intermediate_size,)
        self.up = new_param(rngs, (*up, c.hidden_size), c.dtype)
        self.down = new_param(rngs, (c.hidden_size, c.intermediate_size), c.dtype)
        self.up_bias = new_param(rngs, up, c.dtype, None) if c.mlp_bias else None
        self.down_bias = new_param(rngs, (c.hidden_size,), c.dtype, None) if c.mlp_bias else None

    def __call__(self, x: Float[Array, "tokens hidden"], *, deterministic: bool = False) -> Float[Array, "tokens hidden"]:
        """Widen, activate, narrow; `deterministic` as in `linear`."""
        y = linear(x, value(self.up), optional(self.up_bias), deterministic=deterministic)
        if self.config.mlp == "gated":
            y = activate(self.config.activation, y[:, 0]) * y[:, 1]
        else:
            y = activate(self.config.activation, y)
        return linear(y, value(self.down), optional(self.down_bias), deterministic=deterministic)
