"""Tokens out of logits, and into the results of their requests."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int

from jaxkv.decode.prompts import token_keys
from jaxkv.decode.run_state import Job, Plan, Run
from jaxkv.decode.sampling import sample, token_logprobs
from jaxkv.ops.integers import remainder


class Chosen(NamedTuple):
    """Tokens chosen from logits, for a position of a request (sample `sample` of prompt `prompt`) each.

    Attributes:
      request, prompt, sample, position: i32[rows], what each is for.
      token: i32[rows].
      logprob, sampled_logprob: f32[rows], under the model's own distribution and under the one that was sampled from.
      ends: bool[rows], whether the token ends its sequence.
    """

    request: Int[Array, " rows"]
    prompt: Int[Array, " rows"]
    sample: Int[Array, " rows"]
    position: Int[Array, " rows"]
    token: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    sampled_logprob: Float[Array, " rows"]
    ends: Bool[Array, " rows"]


def choose(job: Job, plan: Plan, logits: Array, request: Array, position: Array) -> Chosen:
    """A token for each row of logits; it depends on them, the request and the position alone."""
    prompt, nth, keys = job.prompt_of(request), remainder(request, job.num_samples), None
    deterministic = plan.numerics.deterministic
    with jax.named_scope("sample"):
        if plan.sampled:
            keys = token_keys(job.keys_of(prompt), nth, position)
        token, sampled_logprob = sample(logits, job.sampling.at(prompt), keys, deterministic=deterministic)
        logprob = token_logprobs(logits, token, deterministic=deterministic)
    ends = jnp.any(token[:, None] == job.eos[None, :], axis=1)
    return Chosen(request, prompt, nth, position, token, logprob, sampled_logprob, ends)


def note(run: Run, plan: Plan, chosen: Chosen, produced: Bool[Array, " rows"], index: Int[Array, " rows"]) -> Run:
    """Write chosen tokens, where `produced`, to their requests' results at `index`; a request's in ascending order."""
    if plan.on_token is not None:
        told = (chosen.prompt, chosen.sample, chosen.position, chosen.token, produced)
        io_callback(_caller(plan.on_token), None, *told, ordered=True)
    place = (jnp.where(produced, chosen.request, run.requests), index)
    # NaN or infinity anywhere in a row of logits is in its normaliser, and so in the token's log-probability.
    overflown = jnp.sum(produced & ~jnp.isfinite(chosen.logprob), dtype=jnp.int32)
    return dataclasses.replace(
        run,
        tokens=run.tokens.at[place].set(chosen.token, mode="drop"),
        logprobs=run.logprobs.at[place].set(chosen.logprob, mode="drop"),
        sampled_logprobs=run.sampled_logprobs.at[place].set(chosen.sampled_logprob, mode="drop"),
        out_lengths=run.out_lengths.at[place[0]].add(1, mode="drop"),
        finished=run.finished.at[place[0]].max(chosen.ends, mode="drop"),
        nonfinite=run.nonfinite + overflown,
    )


def _caller(on_token: Callable[[int, int, int, int], None]) -> Callable[..., None]:
    def call(prompt: Array, nth: Array, position: Array, token: Array, produced: Array) -> None:
        for values in np.stack([prompt, nth, position, token], axis=1)[np.asarray(produced)].tolist():
            on_token(*values)

    return call
