"""`score`: log-probabilities of given tokens, the trainer's forward pass."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.decode.prompts import Prompts, check_flags, numerics_of
from jaxkv.decode.rungs import cut, pad, repeat_last, shapes_are_the_callers
from jaxkv.decode.sampling import Sampling, as_sampling, filtered_logits, token_logprobs
from jaxkv.model.attend import Dense
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.token_ids import ROWS, read_tokens
from jaxkv.ops.numerics import Numerics
from jaxkv.programs import ladder, waiting_on_compiler
from jaxkv.sharding import on_automatic_axes

BLOCK = 256
"""Positions whose logits exist at once: `[BLOCK, vocab]` float32, instead of `[batch * seq, vocab]`."""


def score(
    model: Decoder,
    tokens: Prompts,
    lengths: Int[Array | np.ndarray, " batch"] | Sequence[int] | None = None,
    *,
    sampling: Sampling | None = None,
    deterministic: bool = False,
    remat: bool = False,
    implementation: str | None = None,
) -> Float[Array, "batch seq"]:
    """log p(token | those before it) of every token; differentiable with respect to the model.

    Args:
      model: the decoder.
      tokens: token ids [batch, seq], each row's real ones first; or a list of lists of ids, which may differ in length.
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
    check_decoder(model)
    check_flags(remat=remat)
    numerics = numerics_of(implementation, deterministic)
    if implementation is not None and not deterministic:
        raise ValueError(f"implementation={implementation!r} goes with deterministic=True: otherwise no kernel runs")
    tokens, lengths = read_tokens(tokens, lengths, vocab_size=model.config.vocab_size, names=ROWS)
    batch, seq = tokens.shape
    if seq > model.config.max_seq_len:
        raise ValueError(f"tokens: {seq} are more than the model allows ({model.config.max_seq_len})")
    rows = None if sampling is None else as_sampling(sampling).per_row(batch)
    if shapes_are_the_callers(tokens, lengths, rows):
        return _score(model, tokens, lengths, rows, numerics, bool(remat))
    rung = ladder.rows(batch)
    rows = repeat_last(rows, rung)
    tokens = pad(tokens, rung, ladder.computed(seq, model.config.max_seq_len))
    with waiting_on_compiler(f"score for {rung} rows of up to {tokens.shape[1]:,} tokens"):
        out = _score(model, tokens, pad(lengths, rung, fill=1), rows, numerics, bool(remat))
    return cut(out, batch, seq)


@functools.partial(jax.jit, static_argnames=("numerics", "remat"))
def _score(model: Decoder, tokens: Array, lengths: Array, sampling: Sampling | None, numerics: Numerics, remat: bool) -> Array:
    run = functools.partial(_run, numerics, remat)
    return on_automatic_axes(run, tokens, model, lengths, sampling)


def _run(numerics: Numerics, remat: bool, tokens: Array, model: Decoder, lengths: Array, sampling: Sampling | None) -> Array:
    batch, seq = tokens.shape
    tokens = jnp.where(jnp.arange(seq, dtype=jnp.int32)[None, :] < lengths[:, None], tokens, 0)
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
