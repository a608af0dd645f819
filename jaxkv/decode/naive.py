"""Decoding without a cache: every step computes the whole sequence again.

What the article about the KV cache starts from, and the oracle that `generate` is tested against. Cost per token grows with the
length of the sequence, rounded up to the ladder outside a caller's jit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.decode.options import GenerateOptions, read_job
from jaxkv.decode.prompts import Ends, Prompts, longest_known, longest_sequence, pad_prompts, token_keys
from jaxkv.decode.run_state import Job
from jaxkv.decode.rungs import cut, padded, shapes_are_the_callers
from jaxkv.decode.sampling import Sampling, sample
from jaxkv.model.decoder import Decoder, check_decoder
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
    asked = GenerateOptions(max_new_tokens=max_new_tokens, sampling=sampling, key=key, eos_token_id=eos_token_id)
    (num_prompts, width), most = prompts.shape, model.config.max_seq_len
    total = longest_sequence(model.config, lengths, width, asked.max_new_tokens)
    job = read_job(model.config, prompts, lengths, asked)
    if shapes_are_the_callers(job):
        return _naive(model, job, asked.max_new_tokens, total)
    rung, total = ladder.rows(num_prompts), ladder.computed(longest_known(lengths, width) + asked.max_new_tokens, most)
    with waiting_on_compiler(f"generate_naive for {rung} prompts, up to {total:,} tokens of each"):
        tokens, made = _naive(model, padded(job, rung, total), total, total)
    return cut(tokens, num_prompts, asked.max_new_tokens), cut(made, num_prompts)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _naive(model: Decoder, job: Job, max_new: int, total: int) -> tuple[Array, Array]:
    run = lambda _, model, job: _run(max_new, total, model, job)
    return on_automatic_axes(run, job.prompts, model, job)


def _run(max_new: int, total: int, model: Decoder, job: Job) -> tuple[Array, Array]:
    count, width = job.prompts.shape
    rows = jnp.arange(count, dtype=jnp.int32)
    tokens = jnp.pad(job.prompts[:, :total], ((0, 0), (0, max(total - width, 0))))

    def turn(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, new, made, ended = state
        position = job.prompt_lengths + made
        logits = model(tokens)[rows, position - 1]
        row_keys = None
        if job.keys is not None:
            row_keys = token_keys(job.keys_of(rows), jnp.zeros_like(position), position)
        token, _ = sample(logits, job.sampling, row_keys)
        place = jnp.where(ended, total, position)
        tokens = tokens.at[rows, place].set(token, mode="drop")
        new = new.at[rows, jnp.where(ended, max_new, made)].set(token, mode="drop")
        made = made + (~ended).astype(jnp.int32)
        return tokens, new, made, ended | jnp.any(token[:, None] == job.eos[None, :], axis=1) | (made >= job.limits)

    state = (tokens, jnp.full((count, max_new), -1, jnp.int32), jnp.zeros(count, jnp.int32), rows >= job.num_real)
    _, new, made, _ = while_loop(lambda s: ~jnp.all(s[3]), turn, state, model, job)
    return new, made
