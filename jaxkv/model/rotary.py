"""Rotary position embeddings: the angles of every token, worked out once a step."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.config import Rope
from pallas_kernels.row_tiles import unfused


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
    # Unfused, because XLA on CPU would compute cosine and sine again for every head of every layer.
    cos, sin = unfused(lambda a: jnp.stack([jnp.cos(a), jnp.sin(a)]) * rope.attention_factor, angles)
    return cos, sin
