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

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache, when
from jaxkv.cache.pages import Pages
from jaxkv.decode.admission import admit, make_room, rows_due
from jaxkv.decode.choice import choose, note
from jaxkv.decode.run_state import Chunk, Job, Plan, Run
from jaxkv.decode.step import StepInputs
from jaxkv.model.decoder import Decoder
from jaxkv.ops.integers import quotient_up
from pallas_kernels.key_blocks import order_of
from pallas_kernels.varying import vary_like, while_loop


def advance(model: Decoder, job: Job, run: Run, plan: Plan, until: Array | None = None) -> Run:
    """Step until everything is done, or until `run.steps` reaches `until`.

    One loop, in which every part of the program stands once: rows are filled where that is due, room is made for the next tokens, and the
    model runs with a chunk of prompts or, so that nobody pays for an empty chunk, without one.
    """

    def in_time(r: Run) -> Array:
        return jnp.ones((), bool) if until is None else r.steps < until

    take_step = run_step if plan.speculation is None else plan.speculation.run_step

    def turn(r: Run) -> Run:
        r = when(rows_due(job, r), lambda r: admit(job, r), r)
        return when(jnp.any(r.live), lambda r: take_step(model, job, *_count_waiting(job, r, plan), plan), r)

    return while_loop(lambda r: (jnp.any(r.live) | r.waiting(job)) & in_time(r), turn, run)


def _count_waiting(job: Job, run: Run, plan: Plan) -> tuple[Run, Array]:
    """Whether the next step takes a chunk, and the state that knows how long prompts have been passed over."""
    pays = _chunk_pays(job, run, plan.chunk)
    passed_over = jnp.sum(_to_prefill(run.missing(job)) > 0, dtype=jnp.int32)
    return dataclasses.replace(run, waited=jnp.where(pays, 0, run.waited + passed_over)), pays


def _to_prefill(missing: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
    """Missing tokens of the rows that need a chunk, 0 for those that decode."""
    return jnp.where(missing > 1, missing, 0)


def _chunk_pays(job: Job, run: Run, chunk: Chunk) -> Array:
    """Whether the next step should take a chunk of prompts: there are enough to fill it, or nothing else is to do, or they have
    waited so long that the rows they keep idle cost more than the empty part of the chunk.

    A step's chunk costs the same however full it is, or nearly (the native kernels leave out what is not real). A row that waits for
    one step wastes its share of the step's reading of the weights, and its own work: as much as `idle_cost` prompt tokens cost
    (docs/measurements.md, "Cost of a waiting row").
    """
    idle_cost = 2 + 32 // run.cache.max_seqs
    missing = run.missing(job)
    pieces = jnp.sum(quotient_up(_to_prefill(missing), chunk.width), dtype=jnp.int32)
    empty = (chunk.pieces - pieces) * chunk.width
    return (pieces > 0) & (~jnp.any(missing == 1) | (idle_cost * run.waited >= empty))


def next_inputs(job: Job, run: Run, chunk: Chunk, pays: Array) -> StepInputs:
    """The next tokens: one of each decoding row and, where a chunk pays, as many pieces of rows that are still prefilling as the chunk
    takes, the oldest row's first."""
    missing, lengths = run.missing(job), run.cache.lengths
    decode = run.token_at(job, run.row_request, lengths)
    decode_count = (missing == 1).astype(jnp.int32)
    if missing.shape[0] == 1:  # the only row does not decode beside its own prompt
        decode_count = jnp.where(pays, 0, decode_count)
    missing = jnp.where(pays, _to_prefill(missing), 0)
    oldest = order_of(jnp.where(missing > 0, run.row_request, run.requests))
    missing = missing[oldest]
    pieces = quotient_up(missing, chunk.width)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)
    piece = jnp.arange(chunk.pieces, dtype=jnp.int32)
    nth = jnp.minimum(jnp.sum(ends[None, :] <= piece[:, None], axis=1, dtype=jnp.int32), oldest.shape[0] - 1)
    row, begin = oldest[nth], (piece - (ends - pieces)[nth]) * chunk.width
    count = jnp.clip(missing[nth] - begin, 0, chunk.width)
    position = (lengths[row] + begin)[:, None] + jnp.arange(chunk.width, dtype=jnp.int32)[None, :]
    tokens = run.token_at(job, jnp.broadcast_to(run.row_request[row][:, None], position.shape), position)
    return StepInputs(decode, decode_count, tokens, row, count)


def run_step(model: Decoder, job: Job, run: Run, pays: Array, plan: Plan) -> Run:
    """One step of the model, with a chunk where `pays` holds, and the tokens it gives."""
    run, inputs = make_room(run, lambda r: next_inputs(job, r, plan.chunk, pays), shared=job.shares_pages)
    num_tokens = inputs.num_tokens()
    known = run.known(job, run.row_request)
    cache = run.cache.reserve(num_tokens, max_tokens=plan.chunk.tokens, shared=job.shares_pages).advance(num_tokens)

    def forward(inputs: StepInputs, state: tuple[tuple[Pages, ...], Array]) -> tuple[tuple[Pages, ...], Array]:
        segments = inputs.segments(cache.lengths)
        hidden, pages = model.forward_paged(inputs.tokens(), segments, cache.tables, state[0], plan.numerics)
        return pages, inputs.last_of_each(hidden)

    nothing = jnp.zeros((cache.max_seqs, model.config.hidden_size), model.config.dtype)
    state = vary_like((cache.pages, nothing), model, run, job)
    state = when(pays, lambda s: forward(inputs.beside_chunk(), s), state)
    pages, hidden = when(~pays, lambda s: forward(inputs.without_chunk(), s), state)
    produced = (num_tokens > 0) & (cache.lengths == known)
    logits, cache = model.logits(hidden, plan.numerics, produced), cache.with_pages(pages)
    request = jnp.where(run.live, run.row_request, 0)
    run, index = count_step(run, cache), run.out_lengths[request]
    return note(run, plan, choose(job, plan, logits, request, known), produced, index)


def count_step(run: Run, cache: PagedKVCache) -> Run:
    """The state after a step that left this cache, its counters included."""
    used = cache.num_used
    empty = jnp.sum(jnp.where(run.live, cache.pages_held() * cache.page_size - cache.lengths, 0), dtype=jnp.int32)
    return dataclasses.replace(
        run,
        cache=cache,
        steps=run.steps + 1,
        peak_pages=jnp.maximum(run.peak_pages, used),
        held_slots=run.held_slots + (used * cache.page_size).astype(jnp.float32),
        empty_slots=run.empty_slots + empty.astype(jnp.float32),
    )
