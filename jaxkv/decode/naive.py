"""Decoding without a cache: every step computes the whole sequence again.

What the article about the KV cache starts from, and the oracle that `generate` is tested against. Cost per token grows with the
length of the sequence, rounded up to the ladder outside a caller's jit.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.config import integer
from jaxkv.decode.prompts import Ends, Prompts, end_tokens, keys_of, longest_sequence, pad_prompts, read_keys, token_keys
from jaxkv.decode.rungs import cut, pad, repeat_last, shapes_are_the_callers
from jaxkv.decode.sampling import Sampling, as_sampling, sample
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.token_ids import ArrayLike, as_int32
from jaxkv.programs import ladder, waiting_on_compiler
from jaxkv.sharding import on_automatic_axes
from pallas_kernels.varying import while_loop


def generate_naive(
    model: Decoder,
    prompts: Prompts,
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    key: Array | None = None,
    eos_token_id: Ends = None,
) -> tuple[Int[Array, "num_prompts max_new"], Int[Array, " num_prompts"]]:
    """The tokens `generate` gives with one sample per prompt, the slow way.

    Args:
      model, prompts, prompt_lengths, max_new_tokens, sampling, key, eos_token_id: as for `jaxkv.generate`.

    Returns:
      Generated tokens, an end token included, padded with -1; and how many are real.

    Raises:
      ValueError: as for `jaxkv.generate`.
    """
    check_decoder(model)
    prompts, lengths = pad_prompts(prompts, prompt_lengths, model.config.vocab_size)
    max_new_tokens = integer("max_new_tokens", max_new_tokens)
    num_prompts, width = prompts.shape
    total = longest_sequence(model.config, lengths, width, max_new_tokens)
    sampling = as_sampling(sampling)
    keys = read_keys(key, num_prompts, greedy=sampling.always_greedy)
    rows = sampling.per_row(num_prompts)
    ends = end_tokens(model.config, eos_token_id)
    limits = as_int32(np.full(num_prompts, max_new_tokens))
    job = _Job(prompts, lengths, limits, rows, keys, ends)
    if shapes_are_the_callers(job):
        return _naive(model, job, max_new_tokens, total)
    rung = ladder.rows(num_prompts)
    total = ladder.computed(
        total if isinstance(lengths, Tracer) else int(lengths.max()) + max_new_tokens, model.config.max_seq_len
    )
    job = _Job(
        pad(prompts, rung, total),
        pad(lengths, rung, fill=1),
        pad(limits, rung),
        jax.tree.map(lambda x: repeat_last(x, rung), rows),
        keys if keys is None or not keys.ndim else repeat_last(keys, rung),
        pad(ends, ladder.ends(ends.shape[0]), fill=-1),
    )
    with waiting_on_compiler(f"generate_naive for {rung} prompts, up to {total:,} tokens of each"):
        tokens, made = _naive(model, job, total, total)
    return cut(tokens, num_prompts, max_new_tokens), cut(made, num_prompts)


class _Job(NamedTuple):
    """What was asked for; a prompt whose limit is 0 is padding."""

    prompts: ArrayLike
    lengths: ArrayLike
    limits: ArrayLike
    sampling: Sampling
    keys: Array | None
    ends: ArrayLike


@functools.partial(jax.jit, static_argnums=(2, 3))
def _naive(model: Decoder, job: _Job, max_new: int, total: int) -> tuple[Array, Array]:
    run = lambda _, model, job: _run(max_new, total, model, job)
    return on_automatic_axes(run, job.prompts, model, job)


def _run(max_new: int, total: int, model: Decoder, job: _Job) -> tuple[Array, Array]:
    prompts, lengths, limits, sampling, keys, ends = job
    count, width = prompts.shape
    rows = jnp.arange(count, dtype=jnp.int32)
    tokens = jnp.pad(prompts[:, :total], ((0, 0), (0, max(total - width, 0))))

    def turn(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, new, made, ended = state
        position = lengths + made
        logits = model(tokens)[rows, position - 1]
        row_keys = None
        if keys is not None:
            row_keys = token_keys(keys_of(keys, rows), jnp.zeros_like(position), position)
        token, _ = sample(logits, sampling, row_keys)
        place = jnp.where(ended, total, position)
        tokens = tokens.at[rows, place].set(token, mode="drop")
        new = new.at[rows, jnp.where(ended, max_new, made)].set(token, mode="drop")
        made = made + (~ended).astype(jnp.int32)
        return tokens, new, made, ended | jnp.any(token[:, None] == ends[None, :], axis=1) | (made >= limits)

    state = (tokens, jnp.full((count, max_new), -1, jnp.int32), jnp.zeros(count, jnp.int32), limits <= 0)
    _, new, made, _ = while_loop(lambda s: ~jnp.all(s[3]), turn, state, model, job)
    return new, made
