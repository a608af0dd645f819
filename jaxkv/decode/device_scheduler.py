"""Continuous batching on the device: the scheduler behind `generate`, all of it arrays, so that it runs inside any jit.

Words: a *request* is one sample of one prompt, number `prompt * num_samples + sample`; a *row* is a place in the batch.

    waiting requests                         rows of the batch                       results
    preempted: [5]   next: 9, 10, ...  --->  row_request = [3 | 8 | 4 | none]  --->  tokens[request, :out_lengths[request]]
                     admit: a row ends, the lowest waiting request moves in          a row ended: its pages go back
                     preempt: no page left, the youngest row's request moves back

A row's tokens are its request's prompt and what it has generated. What is not in the cache yet is *missing*: one token means
decode, more mean prefill, in chunks. After a preemption everything is missing and is computed again: nothing else happens.
Samples of one prompt share its pages: a request is admitted by a fork of a row with the same prompt, short of the prompt's last
token, whose logits it needs. While that row still prefills, the request waits.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache, when
from jaxkv.decode.run_state import Chunk, Job, Plan, Run
from jaxkv.decode.sampling import sample, token_logprobs
from jaxkv.decode.step import StepInputs, step
from jaxkv.model.decoder import Decoder


def advance(model: Decoder, job: Job, run: Run, plan: Plan, until: Array | None = None) -> Run:
    """Step until everything is done, or until `run.steps` reaches `until`.

    Steps with a chunk of prompts and steps of decode rows alone are two programs, so that the latter do not pay for an empty
    chunk: two loops that take turns inside a third. They return to it when a row ends, since the code that fills rows is
    large and stands in the program but once; and they take at least one step, as it may have found no room.
    """

    def in_time(r: Run) -> Array:
        return jnp.ones((), bool) if until is None else r.steps < until

    take_step = run_step if plan.speculation is None else plan.speculation.run_step

    def steps(chunk: Chunk, state: tuple[Run, Array]) -> tuple[Run, Array]:
        """Steps of one kind for as long as they are due; the flag says that none was taken since rows were filled."""

        def due(state: tuple[Run, Array]) -> Array:
            r, rested = state
            kind = _chunk_pays(job, r, plan) == (chunk.pieces > 0)
            return jnp.any(r.live) & in_time(r) & kind & (rested | ~_due(job, r, plan))

        def turn(state: tuple[Run, Array]) -> tuple[Run, Array]:
            r = state[0]
            passed_over = jnp.sum(_to_prefill(r.missing(job, plan)) > 0, dtype=jnp.int32)
            waited = 0 if chunk.pieces else r.waited + passed_over
            r = dataclasses.replace(r, waited=jnp.asarray(waited, jnp.int32))
            return take_step(model, job, r, plan, chunk), jnp.zeros_like(state[1])

        return lax.while_loop(due, turn, state)

    def turns(r: Run) -> Run:
        r = when(_due(job, r, plan), lambda r: _admit(job, r, plan), r)
        return steps(Chunk(), steps(plan.chunk, (r, jnp.ones((), bool))))[0]

    return lax.while_loop(lambda r: (jnp.any(r.live) | r.waiting) & in_time(r), turns, run)


def _to_prefill(missing: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
    """Missing tokens of the rows that need a chunk, 0 for those that decode."""
    return jnp.where(missing > 1, missing, 0)


def _chunk_pays(job: Job, run: Run, plan: Plan) -> Array:
    """Whether the next step should take a chunk of prompts: there are enough to fill it, or nothing else is to do, or they have
    waited so long that the rows they keep idle cost more than the empty part of the chunk.

    A step's chunk costs the same however full it is. A row that waits for one step wastes its share of the step's reading of the
    weights, and its own work: as much as so many prompt tokens cost (on 2 cores, SmolLM2: a step of 16 rows takes 40 ms or 2.5 a
    row, a prompt's token 0.6 ms; a step of one row 15 ms).
    """
    idle_cost = 2 + 32 // run.cache.max_seqs
    missing = run.missing(job, plan)
    pieces = jnp.sum(-(-_to_prefill(missing) // plan.chunk.width))
    empty = (plan.chunk.pieces - pieces) * plan.chunk.width
    return (pieces > 0) & (~jnp.any(missing == 1) | (idle_cost * run.waited >= empty))


def _due(job: Job, run: Run, plan: Plan) -> Array:
    """Whether a row's request is done, or a row is empty while requests wait."""
    ended = run.live & run.done(job, plan, run.row_request)
    return jnp.any(ended) | (run.waiting & jnp.any(~run.live))


def _admit(job: Job, run: Run, plan: Plan) -> Run:
    """Empty the rows whose requests are done, and fill empty rows with waiting requests."""
    cache, none = run.cache, run.requests
    ended = run.live & run.done(job, plan, run.row_request)
    empty = ended | ~run.live
    # The n-th empty row is offered the n-th waiting request: the preempted first, then those never admitted.
    nth = jnp.cumsum(empty, dtype=jnp.int32) - 1
    num_preempted = jnp.sum(run.preempted < none, dtype=jnp.int32)
    fresh = jnp.minimum(run.next + nth - num_preempted, none)
    offer = jnp.where(nth < num_preempted, run.preempted.at[nth].get(mode="clip"), fresh)
    offer = jnp.where(empty, offer, none)
    source, shared, blocked = _find_source(job, run, plan, offer, nth, ended)

    known = run.known(job, plan, offer)
    spared = jnp.where((shared > 0) & ~ended[source], shared // cache.page_size, 0)
    need = jnp.where(offer < none, -(-known // cache.page_size) - spared, 0)
    owed = -(-run.known(job, plan, run.row_request) // cache.page_size) - cache.pages_held()
    owed = jnp.sum(jnp.where(run.live & ~ended, jnp.maximum(owed, 0), 0))
    room = cache.num_free + cache.pages_freed_by(ended) - owed
    refused = empty & ((offer == none) | blocked | (jnp.cumsum(need) > room))
    first_refused = jnp.min(jnp.where(refused, nth, cache.max_seqs))
    # With nothing running the first one always fits: the pool was checked to hold the longest sequence.
    alone = ~jnp.any(run.live & ~ended)
    admitted = empty & (offer < none) & ((nth < first_refused) | (alone & (nth == 0)))

    count = jnp.sum(admitted, dtype=jnp.int32)
    returned = jnp.minimum(count, num_preempted)
    shifted = run.preempted.at[jnp.arange(cache.max_seqs) + returned].get(mode="fill", fill_value=none)
    lengths = jnp.where(admitted, shared, 0)
    return dataclasses.replace(
        run,
        cache=cache.assign(ended | admitted, jnp.where(admitted, source, jnp.arange(cache.max_seqs)), lengths),
        row_request=jnp.where(admitted, offer, jnp.where(ended, none, run.row_request)),
        preempted=shifted,
        next=run.next + count - returned,
    )


def _find_source(
    job: Job, run: Run, plan: Plan, offer: Array, nth: Array, ended: Array
) -> tuple[Int[Array, " seqs"], Int[Array, " seqs"], Bool[Array, " seqs"]]:
    """For each row's offered request: a row whose prompt pages it can share, how many tokens, and whether it should wait
    for a row that is still computing them."""
    rows = jnp.arange(run.cache.max_seqs, dtype=jnp.int32)
    if plan.num_samples == 1:
        return rows, jnp.zeros_like(rows), jnp.zeros(rows.shape, bool)
    prompt = offer // plan.num_samples
    shared = job.prompt_lengths.at[prompt].get(mode="fill", fill_value=1) - 1
    same = run.live[None, :] & (run.row_request[None, :] // plan.num_samples == prompt[:, None]) & (shared > 0)[:, None]
    ready = same & (run.cache.lengths[None, :] >= shared[:, None])
    source = jnp.argmax(ready.astype(jnp.int32) * jnp.where(ended, 1, 2)[None, :], axis=1).astype(jnp.int32)
    found = jnp.any(ready, axis=1)
    computing = jnp.any(same & ~ended[None, :], axis=1)
    offered_earlier = (offer < run.requests)[None, :] & (offer[None, :] // plan.num_samples == prompt[:, None])
    offered_earlier = jnp.any(offered_earlier & (nth[None, :] < nth[:, None]) & (shared > 0)[:, None], axis=1)
    return source, jnp.where(found, shared, 0), ~found & (computing | offered_earlier)


def next_inputs(job: Job, run: Run, plan: Plan, chunk: Chunk) -> StepInputs:
    """The next tokens: one of each decoding row, and as many pieces of rows that are still prefilling as the chunk takes, the
    oldest row's first."""
    missing, lengths = run.missing(job, plan), run.cache.lengths
    decode = run.token_at(job, plan, run.row_request, lengths)
    decode_count = (missing == 1).astype(jnp.int32)
    if not chunk.pieces:
        return StepInputs.decode(decode, decode_count)
    missing = _to_prefill(missing)
    oldest = jnp.argsort(jnp.where(missing > 0, run.row_request, run.requests)).astype(jnp.int32)
    missing = missing[oldest]
    pieces = -(-missing // chunk.width)
    ends = jnp.cumsum(pieces)
    piece = jnp.arange(chunk.pieces, dtype=jnp.int32)
    nth = jnp.minimum(jnp.sum(ends[None, :] <= piece[:, None], axis=1, dtype=jnp.int32), oldest.shape[0] - 1)
    row, begin = oldest[nth], (piece - (ends - pieces)[nth]) * chunk.width
    count = jnp.clip(missing[nth] - begin, 0, chunk.width)
    position = (lengths[row] + begin)[:, None] + jnp.arange(chunk.width, dtype=jnp.int32)[None, :]
    tokens = run.token_at(job, plan, jnp.broadcast_to(run.row_request[row][:, None], position.shape), position)
    return StepInputs(decode, decode_count, tokens, row, count)


def make_room(job: Job, run: Run, plan: Plan, chunk: Chunk) -> Run:
    """Preempt the youngest rows until the pages of the next step are there."""

    def short(r: Run) -> Array:
        num_tokens = next_inputs(job, r, plan, chunk).num_tokens()
        return jnp.sum(r.cache.pages_needed(num_tokens)) > r.cache.num_free

    def preempt(r: Run) -> Run:
        youngest = jnp.argmax(jnp.where(r.live, r.row_request, -1))
        row = jnp.arange(r.cache.max_seqs) == youngest
        return dataclasses.replace(
            r,
            cache=r.cache.free(row),
            row_request=jnp.where(row, r.requests, r.row_request),
            preempted=jnp.sort(r.preempted.at[-1].set(r.row_request[youngest])),
            preemptions=r.preemptions + 1,
        )

    return lax.while_loop(short, preempt, run)


def run_step(model: Decoder, job: Job, run: Run, plan: Plan, chunk: Chunk) -> Run:
    """One step of the model, and the tokens it gives."""
    run = make_room(job, run, plan, chunk)
    inputs = next_inputs(job, run, plan, chunk)
    num_tokens = inputs.num_tokens()
    known = run.known(job, plan, run.row_request)
    cache = run.cache.allocate(num_tokens, max_tokens=max(chunk.tokens, 1))
    logits, cache = step(model, cache, inputs, implementation=plan.implementation, deterministic=plan.deterministic)
    produced = (num_tokens > 0) & (cache.lengths == known)
    request = jnp.where(run.live, run.row_request, 0)
    run, index = count_step(run, cache), run.out_lengths[request]
    return note(run, plan, choose(job, plan, logits, request, known), request, known, produced, index)


def count_step(run: Run, cache: PagedKVCache) -> Run:
    """The state after a step that left this cache, its counters included."""
    used = cache.num_pages - 1 - cache.num_free
    empty = jnp.sum(jnp.where(run.live, cache.pages_held() * cache.page_size - cache.lengths, 0))
    return dataclasses.replace(
        run,
        cache=cache,
        steps=run.steps + 1,
        peak_pages=jnp.maximum(run.peak_pages, used),
        held_slots=run.held_slots + (used * cache.page_size).astype(jnp.float32),
        empty_slots=run.empty_slots + empty.astype(jnp.float32),
    )


class Chosen(NamedTuple):
    """Tokens chosen from logits; `ends` says which of them end their sequence."""

    token: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    sampled_logprob: Float[Array, " rows"]
    ends: Bool[Array, " rows"]


def choose(job: Job, plan: Plan, logits: Array, request: Array, position: Array) -> Chosen:
    """A token for each row of logits; it depends on them, the request and the position alone."""
    prompt, nth, keys = request // plan.num_samples, request % plan.num_samples, None
    with jax.named_scope("sample"):
        if plan.sampled:
            keys = jax.vmap(lambda k, s, p: jax.random.fold_in(jax.random.fold_in(k, s), p))(job.keys[prompt], nth, position)
        token, sampled_logprob = sample(logits, job.sampling.at(prompt), keys, deterministic=plan.deterministic)
        logprob = token_logprobs(logits, token, deterministic=plan.deterministic)
    return Chosen(token, logprob, sampled_logprob, jnp.any(token[:, None] == job.eos[None, :], axis=1))


def note(run: Run, plan: Plan, chosen: Chosen, request: Array, position: Array, produced: Array, index: Array) -> Run:
    """Write chosen tokens, where `produced`, to their requests' results at `index`; a request's in ascending order."""
    if plan.on_token is not None:
        prompt, nth = request // plan.num_samples, request % plan.num_samples
        io_callback(_caller(plan.on_token), None, prompt, nth, position, chosen.token, produced, ordered=True)
    place = (jnp.where(produced, request, run.requests), index)
    return dataclasses.replace(
        run,
        tokens=run.tokens.at[place].set(chosen.token, mode="drop"),
        logprobs=run.logprobs.at[place].set(chosen.logprob, mode="drop"),
        sampled_logprobs=run.sampled_logprobs.at[place].set(chosen.sampled_logprob, mode="drop"),
        out_lengths=run.out_lengths.at[place[0]].add(1, mode="drop"),
        finished=run.finished.at[place[0]].max(chosen.ends, mode="drop"),
    )


def _caller(on_token: Callable[[int, int, int, int], None]) -> Callable[..., None]:
    def call(prompt: Array, nth: Array, position: Array, token: Array, produced: Array) -> None:
        for values in np.stack([prompt, nth, position, token], axis=1)[np.asarray(produced)].tolist():
            on_token(*values)

    return call
