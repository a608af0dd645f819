"""Which request is in which row: rows whose request is done are emptied, empty rows are filled, and rows give way when pages run out.

See `jaxkv.decode.device_scheduler` for the picture and the words request and row.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.cache.paged_kv_cache import when
from jaxkv.decode.run_state import Job, Run
from jaxkv.decode.step import StepInputs
from jaxkv.ops.integers import quotient, quotient_up
from pallas_kernels.varying import while_loop


def rows_due(job: Job, run: Run) -> Array:
    """Whether a row's request is done, or a row is empty while requests wait."""
    ended = run.live & run.done(job, run.row_request)
    return jnp.any(ended) | (run.waiting(job) & jnp.any(~run.live))


def admit(job: Job, run: Run) -> Run:
    """Empty the rows whose requests are done, and fill empty rows with waiting requests."""
    cache, none = run.cache, run.requests
    ended = run.live & run.done(job, run.row_request)
    empty = ended | ~run.live
    # The n-th empty row is offered the n-th waiting request: the preempted first, then those never admitted.
    nth = jnp.cumsum(empty, dtype=jnp.int32) - 1
    num_preempted = jnp.sum(run.preempted < none, dtype=jnp.int32)
    fresh = run.next + nth - num_preempted
    fresh = jnp.where(fresh < job.real_requests, fresh, none)
    offer = jnp.where(nth < num_preempted, run.preempted.at[nth].get(mode="clip"), fresh)
    offer = jnp.where(empty, offer, none)
    source, shared, blocked = _find_source(job, run, offer, nth, ended)

    known = run.known(job, offer)
    shared_pages = jnp.where((shared > 0) & ~ended[source], quotient(shared, cache.page_size), 0)
    need = jnp.where(offer < none, quotient_up(known, cache.page_size) - shared_pages, 0)
    owed = quotient_up(run.known(job, run.row_request), cache.page_size) - cache.pages_held()
    owed = jnp.sum(jnp.where(run.live & ~ended, jnp.maximum(owed, 0), 0), dtype=jnp.int32)
    room = cache.num_free + cache.pages_freed_by(ended) - owed
    refused = empty & ((offer == none) | blocked | (jnp.cumsum(need, dtype=jnp.int32) > room))
    first_refused = jnp.min(jnp.where(refused, nth, cache.max_seqs))
    # With nothing running the first one always fits: the pool was checked to hold the longest sequence.
    alone = ~jnp.any(run.live & ~ended)
    admitted = empty & (offer < none) & ((nth < first_refused) | (alone & (nth == 0)))

    count = jnp.sum(admitted, dtype=jnp.int32)
    returned = jnp.minimum(count, num_preempted)
    rows = jnp.arange(cache.max_seqs, dtype=jnp.int32)
    shifted = run.preempted.at[rows + returned].get(mode="fill", fill_value=none)
    lengths = jnp.where(admitted, shared, 0)
    return dataclasses.replace(
        run,
        cache=cache.assign(ended | admitted, jnp.where(admitted, source, rows), lengths),
        row_request=jnp.where(admitted, offer, jnp.where(ended, none, run.row_request)),
        preempted=shifted,
        next=run.next + count - returned,
    )


def _find_source(
    job: Job, run: Run, offer: Array, nth: Array, ended: Array
) -> tuple[Int[Array, " seqs"], Int[Array, " seqs"], Bool[Array, " seqs"]]:
    """For each row's offered request: a row whose prompt pages it can share, how many tokens, and whether it should wait
    for a row that is still computing them."""
    rows = jnp.arange(run.cache.max_seqs, dtype=jnp.int32)
    if job.num_samples == 1:
        return rows, jnp.zeros_like(rows), jnp.zeros(rows.shape, bool)
    prompt = job.prompt_of(offer)
    shared = job.prompt_lengths.at[prompt].get(mode="fill", fill_value=1) - 1
    same = run.live[None, :] & (job.prompt_of(run.row_request)[None, :] == prompt[:, None]) & (shared > 0)[:, None]
    ready = same & (run.cache.lengths[None, :] >= shared[:, None])
    source = lax.argmax(ready.astype(jnp.int32) * (2 - ended.astype(jnp.int32))[None, :], 1, jnp.int32)
    found = jnp.any(ready, axis=1)
    computing = jnp.any(same & ~ended[None, :], axis=1)
    offered_earlier = (offer < run.requests)[None, :] & (prompt[None, :] == prompt[:, None])
    offered_earlier = jnp.any(offered_earlier & (nth[None, :] < nth[:, None]) & (shared > 0)[:, None], axis=1)
    return source, jnp.where(found, shared, 0), ~found & (computing | offered_earlier)


def make_room(run: Run, next_inputs: Callable[[Run], StepInputs], *, shared: bool) -> tuple[Run, StepInputs]:
    """Preempt the youngest rows until the pages for the next step's tokens are there.

    Args:
      run: the state.
      next_inputs: the step's tokens, of a state. In the program once: the first turn of the loop preempts nobody.
      shared: whether rows may share pages.

    Returns:
      The state, and its next inputs.
    """

    def short(r: Run, inputs: StepInputs) -> Array:
        tokens = inputs.num_tokens()
        need = r.cache.pages_needed(tokens) if shared else r.cache.tables.pages_missing(tokens)
        return jnp.sum(need, dtype=jnp.int32) > r.cache.num_free

    def preempt(r: Run) -> Run:
        youngest = lax.argmax(jnp.where(r.live, r.row_request, -1), 0, jnp.int32)
        row = jnp.arange(r.cache.max_seqs, dtype=jnp.int32) == youngest
        return dataclasses.replace(
            r,
            cache=r.cache.free(row),
            row_request=jnp.where(row, r.requests, r.row_request),
            preempted=jnp.sort(r.preempted.at[-1].set(r.row_request[youngest])),
            preemptions=r.preemptions + 1,
        )

    def turn(state: tuple[Run, StepInputs, Array, Array]) -> tuple[Run, StepInputs, Array, Array]:
        r = when(state[3], preempt, state[0])
        inputs = next_inputs(r)
        again = short(r, inputs)
        return r, inputs, again, again

    inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(next_inputs, run))
    yes, no = jnp.ones((), bool), jnp.zeros((), bool)
    run, inputs, _, _ = while_loop(lambda s: s[2], turn, (run, inputs, yes, no))
    return run, inputs
