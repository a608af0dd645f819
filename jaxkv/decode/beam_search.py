"""Beam search on forks: the beams of all prompts are rows of one paged cache, and moving a beam moves reference counts.

    rows      [ prompt 0: beam 0 | beam 1 | beam 2 ][ prompt 1: beam 0 | beam 1 | beam 2 ]
    prefill     computed here  --+--------> fork
    each step   1. rows take one token each; a partly filled page that beams share is copied before it is written
                2. the best `keep` continuations of a prompt's beams; those that end move to the finished ones
                3. the best that go on become the beams: rows swap block tables, pages stay where they are

Scores and stopping are those of transformers 5, so that results are the same (see `jaxkv.decode.beams`). Prompts do not influence one
another, and one that can no longer improve gives its pages back while the others go on.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import CacheConfig, integer, number, shown
from jaxkv.decode.beam_job import BeamJob, Search, cache_sizes, on_a_rung
from jaxkv.decode.beams import Beams, Rules, candidates, select
from jaxkv.decode.outputs import BeamSearchOutput
from jaxkv.decode.prompts import (
    Ends,
    Prompts,
    end_tokens,
    numerics_of,
    pad_prompts,
)
from jaxkv.decode.run_state import Chunk
from jaxkv.decode.rungs import cut, shapes_are_the_callers
from jaxkv.decode.step import StepInputs, step_logits
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.segments import Segment
from jaxkv.model.token_ids import as_int32
from jaxkv.programs import waiting_on_compiler
from jaxkv.sharding import on_automatic_axes
from pallas_kernels.varying import vary_like, while_loop


def beam_search(
    model: Decoder, prompts: Prompts, prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None, *,
    num_beams: int, max_new_tokens: int, length_penalty: float | Array = 1.0, early_stopping: bool | str = False,
    eos_token_id: Ends = None, num_return_sequences: int = 1, page_size: int = 16, num_pages: int | None = None,
    prefill_chunk: int | None = None, deterministic: bool = False, implementation: str | None = None,
) -> BeamSearchOutput:  # fmt: skip
    """The most probable continuations that a beam search finds, over a paged cache, on the device.

    A prompt is computed once and its beams share its pages; where two beams agree they go on sharing them. Works alone and
    inside the caller's `jax.jit`. All beams of all prompts step together, `num_prompts * num_beams` rows.

    Args:
      model: the decoder.
      prompts: token ids, right-padded (what stands in the padding does not matter), or a list of lists of ids.
      prompt_lengths: tokens of each prompt, >= 1; by default all of `prompts`.
      num_beams: sequences kept per prompt, >= 1.
      max_new_tokens: tokens to generate at most, >= 1.
      length_penalty: scores are divided by (generated tokens) ** length_penalty, the prompt not counted; > 0 favours long ones.
      early_stopping: when a prompt that has `num_beams` finished sequences is over. True: at once. False: when its best beam,
        scored at its present length, is no better than the worst of them. "never": when it cannot become better at any length.
      eos_token_id: id or ids that end a sequence; the id itself is part of the result. None is the model's own end tokens, () is
        never.
      num_return_sequences: how many of the `num_beams` best to return.
      page_size: tokens a page holds.
      num_pages: pages in the pool, null page included; by default enough for beams that share nothing but the prompt.
      prefill_chunk: prompt tokens computed at once, by default up to 256.
      deterministic: the bits of a prompt's result do not depend on the other prompts.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.

    Returns:
      A `BeamSearchOutput`.

    Raises:
      ValueError: an argument is out of range; the message names it and the way out. Values that are traced are not checked.

    Source: transformers 5, `GenerationMixin._beam_search`.
    """
    check_decoder(model)
    prompts, lengths = pad_prompts(prompts, prompt_lengths, model.config.vocab_size)
    eos = end_tokens(model.config, eos_token_id)
    width, max_new = prompts.shape[1], integer("max_new_tokens", max_new_tokens)
    rules = _rules(length_penalty, early_stopping, max_new)
    search = Search(
        integer("num_beams", num_beams),
        max_new,
        integer("num_return_sequences", num_return_sequences),
        Chunk.holding(None, width, 1).tokens if prefill_chunk is None else integer("prefill_chunk", prefill_chunk),
        numerics_of(implementation, deterministic),
    )
    _check(search, eos.shape[0], model.config.vocab_size)
    num_pages = None if num_pages is None else integer("num_pages", num_pages, 0)
    sizes = cache_sizes(model, lengths, width, search, integer("page_size", page_size), num_pages)
    job = BeamJob(prompts, lengths, rules, eos, as_int32(np.asarray(prompts.shape[0])))
    if shapes_are_the_callers(job):
        return _beam_search(model, job, search, sizes)
    return _on_the_ladder(model, job, search, sizes, (num_pages is not None, prefill_chunk is not None))


def _on_the_ladder(
    model: Decoder, job: BeamJob, search: Search, sizes: CacheConfig, given: tuple[bool, bool]
) -> BeamSearchOutput:
    """The search by the program of the rung above, and its results cut to what was asked for."""
    shape = (len(job.lengths), search.num_return)
    with waiting_on_compiler(f"beam_search for {search.num_beams} beams of each prompt"):
        out = _beam_search(model, *on_a_rung(model, job, search, sizes, given))
    tokens, lengths, scores = cut(out.tokens, *shape, search.max_new), cut(out.lengths, *shape), cut(out.scores, *shape)
    return BeamSearchOutput(tokens, lengths, scores, out.steps, out.peak_pages)


def _rules(length_penalty: Any, early_stopping: Any, max_new: int) -> Rules:
    stop = early_stopping
    if not isinstance(stop, bool | np.bool_) and not (isinstance(stop, str) and stop == "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {shown(stop)}")
    if not isinstance(length_penalty, jax.Array):
        number("length_penalty", length_penalty)
    elif length_penalty.shape != ():
        raise ValueError(f"length_penalty must be one number, got shape {list(length_penalty.shape)}")
    patient = isinstance(stop, str)
    eager = not patient and bool(stop)
    if not isinstance(length_penalty, Tracer):
        length_penalty = np.asarray(length_penalty, np.float32)
    limit = as_int32(np.asarray(max_new))
    return Rules(length_penalty, cast(Array, np.asarray(eager)), cast(Array, np.asarray(patient)), limit)


def _check(search: Search, num_ends: int, vocab: int) -> None:
    if search.num_return > search.num_beams:
        raise ValueError(f"num_return_sequences is {search.num_return}, but num_beams is only {search.num_beams}")
    if candidates(1, num_ends) > vocab:
        raise ValueError(f"{num_ends} end tokens leave no other in a vocabulary of {vocab}")


class _State(NamedTuple):
    """What goes round the loop: a cache whose rows hold all but each beam's last token, the beams, and counters."""

    cache: PagedKVCache
    beams: Beams
    steps: Int[Array, ""]
    peak_pages: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _beam_search(model: Decoder, job: BeamJob, search: Search, sizes: CacheConfig) -> BeamSearchOutput:
    def run(_: Array, model: Decoder, job: BeamJob) -> BeamSearchOutput:
        state = _run(model, job, search, sizes)
        beams = state.beams
        results = (x[:, : search.num_return] for x in (beams.done_tokens, beams.done_lengths, beams.done_scores))
        return BeamSearchOutput(*results, state.steps, state.peak_pages)  # pyright: ignore[reportCallIssue]

    return on_automatic_axes(run, job.prompts, model, job)


def _run(model: Decoder, job: BeamJob, search: Search, sizes: CacheConfig) -> _State:
    num_prompts, num_beams, eos = job.prompts.shape[0], search.num_beams, job.eos
    given = (model, job)
    cache = vary_like(PagedKVCache.of_sizes(model.config, sizes, model.mesh), given)
    logits, cache = _prefill(model, cache, job, search)
    first = jnp.repeat(jnp.arange(num_prompts, dtype=jnp.int32) * num_beams, num_beams)
    cache = cache.fork(first, jnp.arange(cache.max_seqs, dtype=jnp.int32))
    real = jnp.arange(num_prompts, dtype=jnp.int32) < job.num_real
    beams = vary_like(Beams.start(real, num_beams, search.max_new, job.rules), given)
    state = _State(cache, beams, jnp.zeros((), jnp.int32), cache.num_used)
    state = _select(state, jnp.repeat(logits, num_beams, axis=0), eos, search)
    return while_loop(lambda s: ~jnp.all(s.beams.over()), lambda s: _turn(model, s, eos, search), state)


def _prefill(
    model: Decoder, cache: PagedKVCache, job: BeamJob, search: Search
) -> tuple[Float[Array, "num_prompts vocab"], PagedKVCache]:
    """Every prompt once, into the first row of its beams, one chunk of one prompt at a time; logits of their last tokens."""
    (prompts, lengths, *_), config = job, model.config

    def chunk(state: tuple[PagedKVCache, Array, Array]) -> tuple[PagedKVCache, Array, Array]:
        cache, last, prompt = state
        row = prompt * search.num_beams
        begin = cache.lengths[row]
        count = jnp.minimum(lengths[prompt] - begin, search.chunk)
        tokens = prompts.at[prompt, begin + jnp.arange(search.chunk, dtype=jnp.int32)].get(mode="clip")
        added = jnp.where(jnp.arange(cache.max_seqs, dtype=jnp.int32) == row, count, 0)
        cache = cache.allocate(added, max_tokens=search.chunk).advance(added)
        segment = Segment(row[None], cache.lengths[row][None], count[None], queries=search.chunk)
        hidden, pages = model.forward_paged(tokens, (segment,), cache.tables, cache.pages, search.numerics)
        last = last.at[prompt].set(hidden[count - 1])
        return cache.with_pages(pages), last, prompt + (begin + count == lengths[prompt]).astype(jnp.int32)

    last = jnp.zeros((prompts.shape[0], config.hidden_size), config.dtype)
    state = (cache, last, jnp.zeros((), jnp.int32))
    cache, last, _ = while_loop(lambda s: s[2] < job.num_real, chunk, state)
    return model.logits(last, search.numerics), cache


def _turn(model: Decoder, state: _State, eos: Array, search: Search) -> _State:
    """Each beam's last token through the model, and a choice of the next; rows of prompts that are over take no part."""
    beams = state.beams
    last = beams.tokens[:, :, beams.count - 1].reshape(-1)
    count = jnp.repeat((~beams.over()).astype(jnp.int32), search.num_beams)
    cache = state.cache.allocate(count, max_tokens=1).advance(count)
    logits, pages = step_logits(model, StepInputs.decode(last, count), cache.tables, cache.pages, search.numerics)
    cache = cache.with_pages(pages)
    state = _State(cache, beams, state.steps + 1, jnp.maximum(state.peak_pages, cache.num_used))
    return _select(state, logits, eos, search)


def _select(state: _State, logits: Float[Array, "rows vocab"], eos: Array, search: Search) -> _State:
    """Choose among the beams' continuations, and give each row the pages of the beam that it continues."""
    cache, (num_prompts, num_beams) = state.cache, state.beams.scores.shape
    with jax.named_scope("select_beams"):
        logits = logits.reshape(num_prompts, num_beams, -1)
        beams, parent = select(state.beams, logits, eos)
        source = (jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * num_beams + parent).reshape(-1)
        over = jnp.repeat(beams.over(), num_beams)
        kept = jnp.where(over, 0, cache.lengths[source])
        return state._replace(cache=cache.assign(jnp.ones(cache.max_seqs, bool), source, kept), beams=beams)
