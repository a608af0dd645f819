"""`score`: log-probabilities of given tokens, the trainer's forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.decode.prompts import check_tokens, first_outside
from jaxkv.decode.sampling import Sampling, filtered_logits, token_logprobs
from jaxkv.model.attend import Dense
from jaxkv.model.decoder import Decoder
from jaxkv.ops.numerics import Numerics
from jaxkv.sharding import on_automatic_axes

BLOCK = 256
"""Positions whose logits exist at once: `[BLOCK, vocab]` float32, instead of `[batch * seq, vocab]`."""


def score(
    model: Decoder,
    tokens: Int[Array | np.ndarray, "batch seq"],
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    *,
    sampling: Sampling | None = None,
    deterministic: bool = False,
    remat: bool = False,
    implementation: str | None = None,
) -> Float[Array, "batch seq"]:
    """log p(token | those before it) of every token; differentiable with respect to the model.

    Args:
      model: the decoder.
      tokens: token ids, each row's real ones first.
      lengths: how many are real, by default all.
      sampling: score under the distribution that `generate` samples from with these values (after temperature and filters)
        instead of the model's own; numbers, or arrays of one entry per row.
      deterministic: the result equals the `logprobs` of `generate(..., deterministic=True)` bit by bit.
      remat: recompute each layer's activations in the backward pass instead of keeping them.
      implementation: of the attention kernel (see `pallas_kernels.paged_attention`); goes with `deterministic`, and must then be
        the one that `generate` ran with.

    Returns:
      float32; 0 at position 0, for which nothing comes before, and from `lengths` on.

    Raises:
      ValueError: a token id or a length is out of range (where they are known), or the rows are longer than the model allows.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [batch, seq], both at least 1, got {tokens.dtype}{list(tokens.shape)}")
    if implementation is not None and not deterministic:
        raise ValueError(f"implementation={implementation!r} goes with deterministic=True: otherwise no kernel runs")
    batch, seq = tokens.shape
    if seq > model.config.max_seq_len:
        raise ValueError(f"{seq} tokens are more than the model allows ({model.config.max_seq_len})")
    lengths = jnp.full(batch, seq, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must be [batch] = [{batch}], got shape {list(lengths.shape)}")
    wrong = first_outside(lengths, 1, seq)
    if wrong is not None:
        raise ValueError(f"row {wrong} has length {lengths[wrong]}, but must have 1 to {seq} tokens")
    check_tokens(tokens, lengths, model.config.vocab_size)
    tokens = jnp.where(jnp.arange(seq, dtype=jnp.int32)[None, :] < lengths[:, None], tokens.astype(jnp.int32), 0)
    sampling = None if sampling is None else sampling.per_row(batch)
    return _score(model, tokens, lengths, sampling, Numerics(implementation, deterministic), remat)


@functools.partial(jax.jit, static_argnames=("numerics", "remat"))
def _score(model: Decoder, tokens: Array, lengths: Array, sampling: Sampling | None, numerics: Numerics, remat: bool) -> Array:
    run = functools.partial(_run, numerics, remat)
    return on_automatic_axes(run, tokens, model, lengths, sampling)


def _run(numerics: Numerics, remat: bool, tokens: Array, model: Decoder, lengths: Array, sampling: Sampling | None) -> Array:
    batch, seq = tokens.shape
    positions = jnp.tile(jnp.arange(seq, dtype=jnp.int32), batch)
    hidden, _ = model.forward(tokens.reshape(-1), positions, Dense(batch, seq, numerics, model.mesh), remat=remat)
    targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1).reshape(-1)  # the last position predicts nothing
    rows = jnp.arange(batch * seq, dtype=jnp.int32) // seq

    @jax.checkpoint
    def block(args: tuple[Array, Array, Array]) -> Array:
        states, target, row = args
        logits = model.logits(states, numerics)
        if sampling is not None:
            logits = filtered_logits(logits, sampling.at(row))
        return token_logprobs(logits, target, deterministic=numerics.deterministic)

    size = min(BLOCK, -(-batch * seq // 16) * 16)
    blocks = -(-batch * seq // size)
    pad = blocks * size - batch * seq
    padded = [jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) for x in (hidden, targets, rows)]
    logprobs = lax.map(block, tuple(x.reshape(blocks, size, *x.shape[1:]) for x in padded))
    logprobs = logprobs.reshape(-1)[: batch * seq].reshape(batch, seq)
    shifted = jnp.concatenate([jnp.zeros((batch, 1), jnp.float32), logprobs[:, :-1]], axis=1)
    return jnp.where(jnp.arange(seq, dtype=jnp.int32)[None, :] < lengths[:, None], shifted, 0.0)
