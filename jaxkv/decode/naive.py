"""Decoding without a cache: every step computes the whole sequence again.

What the article about the KV cache starts from, and the oracle that `generate` is tested against. Cost per token grows with the
length of the sequence; one compilation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.config import integer
from jaxkv.decode.prompts import Ends, Prompts, end_tokens, longest_sequence, pad_prompts, prompt_keys, token_keys
from jaxkv.decode.sampling import Sampling, as_sampling, sample
from jaxkv.model.decoder import Decoder, check_decoder
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
    longest_sequence(model.config, lengths, prompts.shape[1], max_new_tokens)
    sampling = as_sampling(sampling)
    greedy = sampling.always_greedy
    keys = prompt_keys(key, prompts.shape[0], greedy=greedy)
    rows = sampling.per_row(prompts.shape[0])
    ends = end_tokens(model.config, eos_token_id)
    return _naive(model, prompts, lengths, rows, keys, ends, max_new_tokens, greedy)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _naive(
    model: Decoder, prompts: Array, lengths: Array, sampling: Sampling, keys: Array, ends: Array, max_new: int, greedy: bool
) -> tuple[Array, Array]:
    run = functools.partial(_run, max_new, greedy)
    return on_automatic_axes(run, prompts, model, lengths, sampling, keys, ends)


def _run(
    max_new: int, greedy: bool, prompts: Array, model: Decoder, lengths: Array, sampling: Sampling, keys: Array, ends: Array
) -> tuple[Array, Array]:
    count, width = prompts.shape
    rows = jnp.arange(count, dtype=jnp.int32)
    total = min(width + max_new, model.config.max_seq_len)
    tokens = jnp.pad(prompts, ((0, 0), (0, total - width)))

    def turn(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, new, made, ended = state
        position = lengths + made
        logits = model(tokens)[rows, position - 1]
        row_keys = None
        if not greedy:
            row_keys = token_keys(keys, jnp.zeros_like(position), position)
        token, _ = sample(logits, sampling, row_keys)
        place = jnp.where(ended, total, position)
        tokens = tokens.at[rows, place].set(token, mode="drop")
        new = new.at[rows, jnp.where(ended, max_new, made)].set(token, mode="drop")
        made = made + (~ended).astype(jnp.int32)
        return tokens, new, made, ended | jnp.any(token[:, None] == ends[None, :], axis=1) | (made >= max_new)

    state = (tokens, jnp.full((count, max_new), -1, jnp.int32), jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))
    _, new, made, _ = while_loop(lambda s: ~jnp.all(s[3]), turn, state, model, lengths, sampling, keys, ends)
    return new, made
