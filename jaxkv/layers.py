"""The parts of a decoder layer: linear, norms, rotary positions, MLP.

Everything here works on a flat list of tokens, `[tokens, ...]`; which tokens belong to one sequence is known to attention alone.
Weights keep Hugging Face's `[out, in]` orientation. Matrices that read the same input are stored as one array, so that a
step reads them with one product: `qkv` is `[kv_heads, q_per_kv + 2, head_dim, in]` (each kv head's queries, then its key, then
its value: splitting kv_heads over devices cuts no head apart), `gate_up` is `[2, intermediate, in]`.
"""

import functools
import platform
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.config import Activation, ModelConfig, Rope

TILE = 16
"""Rows of one product in deterministic mode. A product's bits depend on its number of rows, so there it never varies.

16 because CPU products get slower by less than their rows up to about there: SmolLM2's take 12 ms for one row, 17 for 8, 21 for 16,
29 for 32, 54 for 64. Smaller tiles would serve a single row better and 64 rows worse."""


def _weight_left(x: Array, weight: Array) -> Array:
    """x [rows, in], weight [out, in] -> [rows, out], with the weight as the left operand.

    On the right, XLA's CPU products repack the whole weight at every call. Without the barrier the transpose is folded into the
    product and the operands swap back. Asked for float32, a bfloat16 product accumulates in it and reads the weight once; asked
    for bfloat16, jaxlib 0.10.2 may convert the whole weight first. A single bfloat16 row takes a scalar path ten times slower
    than two rows.
    """
    rows, width = x.shape
    narrow = x.dtype == jnp.bfloat16
    if SUMS_ARE_FAST and width < LONG and (rows == 1 if narrow else 2 <= rows <= 2 * TILE):
        y = _sums(weight, x)
    else:
        x = jnp.concatenate([x, x]) if narrow and rows == 1 else x
        y = _dot(weight, x)
    return lax.optimization_barrier(y).T[:rows].astype(x.dtype)


SUMS_ARE_FAST = platform.machine() in ("x86_64", "AMD64")
LONG = 2048
"""Few rows by a weight whose rows are shorter than this are summed product by product, where that was measured to be faster.

XLA hands such sums to the library that does its products, too, which then cuts them better: SmolLM2's products take 17 ms instead
of 22 for 8 rows, 21 instead of 26 for 16, 14 instead of 19 for one of bfloat16; from 2,048 on they take longer."""


def _dot(weight: Array, x: Array) -> Array:
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_jvp
def _sums(weight: Array, x: Array) -> Array:
    """`_dot` as a sum of products; its derivatives are products again, which need no memory for [out, rows, in] numbers."""
    # Without the barrier a loop around it converts all bfloat16 weights to float32 first, and reads those.
    weight, x = lax.optimization_barrier((weight, x))
    w, x = weight.astype(jnp.float32), x.astype(jnp.float32)
    if x.shape[0] == 1:
        return jnp.sum(w * x, axis=1, keepdims=True)
    return jnp.sum(w[:, None, :] * x[None, :, :], axis=-1)


@_sums.defjvp
def _sums_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weight, x), (d_weight, d_x) = primals, tangents
    return _sums(weight, x), _dot(d_weight, x) + _dot(weight, d_x)


def _weight_right(x: Array, weight: Array) -> Array:
    """The same product as GPU and TPU compilers like it: nothing to work around."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _product(x: Array, weight: Array) -> Array:
    return lax.platform_dependent(x, weight, cpu=_weight_left, default=_weight_right)


def in_row_tiles(f: Callable[..., Array], rows: tuple[Array, ...], shared: tuple[Array, ...]) -> Array:
    """`f(*rows, *shared)`, computed TILE rows at a time: a row's bits then never depend on how many rows there are.

    Products and sums along a row are cut among threads and vector lanes by the number of rows; with one shape there is one cut.
    Tiles run in a loop, even a single one, whose number of turns the compiler cannot know: so it cannot fuse a tile with what
    stands around it either, which would change how sums are formed and where they are rounded.

    The gradient is that of `f` itself: only values must agree between rollout and training.

    Args:
      f: takes arrays whose first axis is rows, then the shared ones; returns one whose first axis is rows. Treats each row alike.
      rows: `[rows, ...]` each, the first one floating.
      shared: read by every tile, such as weights.
    """
    return cast(Array, _in_row_tiles(f, rows, shared))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_row_tiles(f: Callable[..., Array], rows: tuple[Array, ...], shared: tuple[Array, ...]) -> Array:
    count = rows[0].shape[0]
    tiles = -(-count // TILE)
    padded = [jnp.pad(x, [(0, tiles * TILE - count)] + [(0, 0)] * (x.ndim - 1)) for x in rows]

    def tile(i: Array, y: Array) -> Array:
        part = [lax.dynamic_slice_in_dim(x, i * TILE, TILE) for x in padded]
        return lax.dynamic_update_slice_in_dim(y, f(*part, *shared), i * TILE, 0)

    out = jax.eval_shape(f, *(x[:TILE] for x in padded), *shared)
    empty = jnp.zeros((tiles * TILE, *out.shape[1:]), out.dtype)
    something = lax.bitcast_convert_type(padded[0].reshape(-1)[0].astype(jnp.float32), jnp.int32)
    return lax.fori_loop(0, lax.clamp(jnp.int32(tiles), something, jnp.int32(tiles)), tile, empty)[:count]


def _in_row_tiles_fwd(f: Callable[..., Array], rows: tuple, shared: tuple) -> tuple[Array, tuple]:
    return in_row_tiles(f, rows, shared), (rows, shared)


def _in_row_tiles_bwd(f: Callable[..., Array], saved: tuple, g: Array) -> tuple:
    return jax.vjp(lambda rows, shared: f(*rows, *shared), *saved)[1](g)


_in_row_tiles.defvjp(_in_row_tiles_fwd, _in_row_tiles_bwd)


def linear(x: Float[Array, "tokens in"], weight: Array, bias: Array | None = None, *, deterministic: bool = False) -> Array:
    """x times the transposed weight, plus the bias.

    Args:
      x: inputs, of the weight's dtype.
      weight: `[*out, in]`; any number of output axes.
      bias: `[*out]` or None.
      deterministic: compute in fixed row tiles; a row's bits then do not depend on the number of tokens.

    Returns:
      `[tokens, *out]` in x's dtype.
    """
    flat = weight.reshape(-1, weight.shape[-1])
    y = in_row_tiles(_product, (x,), (flat,)) if deterministic else _product(x, flat)
    y = y.reshape(x.shape[0], *weight.shape[:-1])
    return y if bias is None else y + bias[None]


def value(param: Any) -> Array:
    """The array inside an nnx parameter."""
    return param[...]


def optional(param: Any) -> Array | None:
    """The array inside an nnx parameter, or None where the model has none."""
    return None if param is None else param[...]


def new_param(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str, std: float | None = 0.02) -> nnx.Param:
    """A parameter of normal noise of standard deviation `std`, or of zeros where it is None."""
    array = jnp.zeros(shape, dtype) if std is None else jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(std, dtype)
    return nnx.Param(array)


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
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


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

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
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
