"""From rollouts to training: prompts and generated tokens as whole sequences, and how far two sets of log-probabilities disagree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv.config import shown
from jaxkv.decode.outputs import GenerateOutput, readable
from jaxkv.decode.prompts import Prompts, pad_prompts
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.token_ids import ArrayLike
from jaxkv.rl.score import score
from jaxkv.sharding import on_automatic_axes


class Sequences(NamedTuple):
    """Prompts with their continuations, one row per sample, ready for `jaxkv.score`.

    Attributes:
      tokens: i32[num_prompts * num_samples, width + max_new], 0 after the end.
      lengths: tokens of each row.
      new: True at generated tokens.
      logprobs: of the generated tokens, as `generate` reported them, aligned with what `score` returns; 0 elsewhere.
      sampled_logprobs: the same under the distribution that was sampled from.
    """

    tokens: Int[Array, "rows seq"]
    lengths: Int[Array, " rows"]
    new: Bool[Array, "rows seq"]
    logprobs: Float[Array, "rows seq"]
    sampled_logprobs: Float[Array, "rows seq"]

    def __repr__(self) -> str:
        """In words; names alone where values are traced or are no arrays."""
        if not readable(self.tokens, self.lengths, self.new) or (self.tokens.ndim, self.lengths.ndim, self.new.ndim) != (
            2,
            1,
            2,
        ):
            return f"Sequences({', '.join(self._fields)})"  # jax builds one of placeholders, or adds an axis
        rows, width = self.tokens.shape
        real, new = int(np.sum(np.asarray(self.lengths))), int(np.sum(np.asarray(self.new)))
        return f"Sequences({rows} rows of up to {width} tokens, {real} in all, {new} of them generated; .{', .'.join(self._fields)})"


class Mismatch(NamedTuple):
    """How log-probabilities of the trainer differ from those of the rollout; scalars, over all generated tokens.

    Attributes:
      max_difference, mean_difference: of |trainer - rollout|, in nats.
      outside: share of tokens whose probability ratio trainer / rollout is outside [0.9, 1.1].
      effective_sample_size: (sum r)^2 / (n sum r^2) of those ratios, 1.0 when all are equal.
    """

    max_difference: Float[Array, ""]
    mean_difference: Float[Array, ""]
    outside: Float[Array, ""]
    effective_sample_size: Float[Array, ""]


def sequences(
    prompts: Prompts,
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None,
    out: GenerateOutput,
) -> Sequences:
    """Join prompts and what `generate` made of them; works inside jit.

    Args:
      prompts, prompt_lengths: as for `jaxkv.generate`.
      out: its result.

    Raises:
      ValueError: the prompts are not those of `out` by their number, or are no prompts.
    """
    if not isinstance(out, GenerateOutput):
        raise ValueError(f"out must be what jaxkv.generate returned, got {shown(out)}")
    prompts, lengths = pad_prompts(prompts, prompt_lengths)
    num_prompts = out.tokens.shape[0]
    if prompts.shape[0] != num_prompts:
        raise ValueError(f"there are {prompts.shape[0]} prompts, but the output is of {num_prompts}: pass those of `out`")
    return on_automatic_axes(_joined, prompts, lengths, out)


def _joined(prompts: ArrayLike, lengths: ArrayLike, out: GenerateOutput) -> Sequences:
    _, num_samples, max_new = out.tokens.shape
    prompts, lengths = jnp.repeat(prompts, num_samples, axis=0), jnp.repeat(lengths, num_samples)
    position = jnp.arange(prompts.shape[1] + max_new, dtype=jnp.int32)[None, :]
    index = position - lengths[:, None]
    made = out.lengths.reshape(-1)
    new = (index >= 0) & (index < made[:, None])

    def aligned(x: Array) -> Array:
        return jnp.take_along_axis(x.reshape(-1, max_new), jnp.clip(index, 0, max_new - 1), axis=1)

    given = jnp.take_along_axis(prompts, jnp.broadcast_to(jnp.minimum(position, prompts.shape[1] - 1), index.shape), axis=1)
    tokens = jnp.where(index < 0, given, jnp.where(new, aligned(out.tokens), 0))
    logprobs, sampled = (jnp.where(new, aligned(x), 0.0) for x in (out.logprobs, out.sampled_logprobs))
    return Sequences(tokens, lengths + made, new, logprobs, sampled)


def mismatch(
    model: Decoder,
    prompts: Prompts,
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None,
    out: GenerateOutput,
    *,
    deterministic: bool = False,
) -> Mismatch:
    """How far `score` is from the log-probabilities that `generate` reported, for the same model.

    Zero in every figure when both run with `deterministic=True`; otherwise a measure of how much importance ratios are off
    before any training step.

    Args:
      model: the trainer's parameters.
      prompts, prompt_lengths, out: arguments and result of `generate`.
      deterministic: how `score` runs.

    Raises:
      ValueError: as for `sequences` and `score`.
    """
    check_decoder(model)
    rows = sequences(prompts, prompt_lengths, out)
    trainer = score(model, rows.tokens, rows.lengths, deterministic=deterministic)
    difference = jnp.where(rows.new, trainer - rows.logprobs, 0.0)
    count = jnp.maximum(jnp.sum(rows.new, dtype=jnp.int32), 1).astype(jnp.float32)
    ratio = jnp.where(rows.new, jnp.exp(difference), 0.0)
    outside = rows.new & ((ratio < 0.9) | (ratio > 1.1))
    size = jax.lax.square(jnp.sum(ratio)) / jnp.maximum(count * jnp.sum(ratio * ratio), 1e-30)
    return Mismatch(
        jnp.max(jnp.abs(difference)),
        jnp.sum(jnp.abs(difference)) / count,
        jnp.sum(outside, dtype=jnp.int32).astype(jnp.float32) / count,
        size,
    )
