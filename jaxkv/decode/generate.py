"""`generate`: prompts in, tokens out, as one pure function that can stand inside the caller's jit; and `stream`, which runs
the same steps from the host and yields tokens as they are made.

Both turn their arguments into a `Job`, a `Plan` and the sizes of a cache (`jaxkv.decode.options`) and let
`jaxkv.decode.device_scheduler` do the work.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.report import Bookkeeping
from jaxkv.config import CacheConfig, integer, shown
from jaxkv.decode.device_scheduler import advance
from jaxkv.decode.options import GenerateOptions, Prepared, prepare
from jaxkv.decode.outputs import GenerateOutput, GenerateStats, Token
from jaxkv.decode.prompts import Ends, Prompts
from jaxkv.decode.run_state import Job, Plan, Run, start
from jaxkv.decode.rungs import Asked, cut
from jaxkv.decode.sampling import Sampling
from jaxkv.decode.speculative import Draft, NGram, with_draft_pages
from jaxkv.model.decoder import Decoder
from jaxkv.programs import waiting_on_compiler
from jaxkv.sharding import on_automatic_axes, within
from pallas_kernels.varying import vary_like


def generate(
    model: Decoder, prompts: Prompts, prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None, *,
    max_new_tokens: int, sampling: Sampling | None = None, key: Array | None = None, eos_token_id: Ends = None, num_samples: int = 1,
    token_limits: Int[Array | np.ndarray, " num_prompts"] | None = None, page_size: int = 16, num_pages: int | None = None,
    max_seqs: int | None = None, prefill_chunk: int | None = None, cache_dtype: str | None = None, deterministic: bool = False,
    implementation: str | None = None, on_token: Callable[[int, int, int, int], None] | None = None,
    speculative: NGram | Draft | None = None,
) -> GenerateOutput:  # fmt: skip
    """Generate from prompts of different lengths by continuous batching over a paged cache, on the device.

    `max_seqs` rows work at a time; the other prompts wait, and move in as rows end. Pages are taken as sequences grow; when
    none is left the youngest row is preempted and computed again later. A prompt's result does not depend on any of this.
    Works alone and inside the caller's `jax.jit`. A model's `generation_config.json` is not read but for its end tokens: what is not
    given is as said here (`AutoModelForCausalLM` and `jaxkv generate` follow the file).

    Args:
      model: the decoder.
      prompts: token ids, right-padded (what stands in the padding does not matter), or a list of lists of ids.
      prompt_lengths: tokens of each prompt, >= 1; by default all of `prompts`.
      max_new_tokens: tokens to generate per sample, at most, >= 1.
      sampling: how to choose tokens; by default greedy.
      key: `jax.random.key`, or an array of one key per prompt. One key stands for `fold_in(key, i)` for prompt i. Sample s
        then uses `fold_in(fold_in(key_i, s), position)` at each position. Needed unless everything is greedy.
      eos_token_id: id or ids that end a sequence; the id itself is part of the result. None is the model's own end tokens
        (`model.config.eos_token_ids`), () is never.
      num_samples: samples per prompt; their prompt's pages are computed once and shared.
      token_limits: tokens to generate per sample for each prompt, 1 to `max_new_tokens`.
      page_size: tokens a page holds.
      num_pages: pages in the pool, null page included; by default as many as all rows can ever need.
      max_seqs: rows, by default one per sample up to 64.
      prefill_chunk: prompt tokens that ride along in one step, at most, those of several prompts together; by default 256.
      cache_dtype: of keys and values, by default the model's.
      deterministic: `logprobs` then equal those of `score(..., deterministic=True)` bit by bit, whatever the batch.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.
      on_token: called on the host with (prompt, sample, position, token) for each token as rows advance.
      speculative: guess several tokens at once and check them in one step: fewer steps, the same tokens (see
        `jaxkv.decode.speculative`). `NGram` guesses what followed the same words before, `Draft` by a smaller model.

    Returns:
      A `GenerateOutput`.

    Raises:
      ValueError: an argument is out of range; the message names it and the way out. Values that are traced are not checked.

    Source: continuous batching, Yu et al., "Orca" (OSDI 2022); prefill chunks beside decode rows, arXiv:2308.16369.
    """
    options = GenerateOptions(
        max_new_tokens=max_new_tokens, sampling=sampling, key=key, eos_token_id=eos_token_id, num_samples=num_samples,
        token_limits=token_limits, page_size=page_size, num_pages=num_pages, max_seqs=max_seqs, prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype, deterministic=deterministic, implementation=implementation, on_token=on_token,
        speculative=speculative,
    )  # fmt: skip
    return _run_prepared(model, prepare(model, prompts, prompt_lengths, options))


def _run_prepared(model: Decoder, todo: Prepared) -> GenerateOutput:
    """Results in the caller's shapes, whichever shapes they are computed in."""
    job, plan, sizes, asked = todo
    if asked is None:
        return _generate(model, job, plan, sizes)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((model, job)))
    if traced:  # by grad or vmap without jit, under which a run that is donated could not be
        out = _generate(model, job, plan, sizes)
        front = lambda x: cut(x, asked.num_prompts, job.num_samples, asked.max_new)
        return GenerateOutput(*map(front, out[:-1]), out.stats)  # pyright: ignore[reportCallIssue]
    return _cut_output(run_job(model, job, plan, sizes), job, asked)


def run_job(model: Decoder, job: Job, plan: Plan, sizes: CacheConfig) -> Run:
    """Everything that a job asks for, outside jit: by the programs of `stream`."""
    with waiting_on_compiler(_title("generate", job, sizes)):
        return take_steps(model, job, _start(model, job, plan, sizes), plan, NEVER)


def stream(
    model: Decoder,
    prompts: Prompts,
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None,
    *,
    steps_per_turn: int = 1,
    on_turn: Callable[[Bookkeeping, np.ndarray], None] | None = None,
    **options,
) -> Iterator[Token]:
    """`generate`, yielding tokens as they are made; the same arguments except `on_token`, the same tokens.

    Args:
      model, prompts, prompt_lengths, **options: as for `generate`.
      steps_per_turn: model steps between two looks at the results.
      on_turn: called after each turn, before its tokens come, with the cache's block tables and the request in each row
        (prompt * num_samples + sample, -1 for none), i32[seqs]. `jaxkv.viz.record` draws from it.

    Returns:
      An iterator over `Token`; its generator's return value (`yield from`) is the `GenerateOutput`.

    Raises:
      ValueError: as for `generate`, before the first step.
    """
    asked = GenerateOptions.of("stream", options)
    if asked.on_token is not None:
        raise TypeError("stream() takes no on_token: it yields the tokens")
    todo = prepare(model, prompts, prompt_lengths, asked)
    if on_turn is not None and not callable(on_turn):
        raise ValueError(f"on_turn must be a function of (bookkeeping, requests), got {shown(on_turn)}")
    return _stream(model, todo, integer("steps_per_turn", steps_per_turn), on_turn)


def _tell(on_turn: Callable, books: Bookkeeping, requests: np.ndarray, asked: Asked | None) -> None:
    """The cache as it would be without what a rung's size has added to its rows and tables."""
    if asked is not None:
        books, requests = books.front(asked.rows, asked.pages_per_row), requests[: asked.rows]
    on_turn(books, requests)


def _title(name: str, job: Job, sizes: CacheConfig) -> str:
    """What is compiled, for whoever waits."""
    rows = "1 row" if sizes.max_seqs == 1 else f"{sizes.max_seqs} rows"
    return f"{name} for {rows}, prompts of up to {job.prompts.shape[1]:,} tokens"


NEVER = np.int32(2**31 - 1)
"""As many steps as no run takes."""


def _stream(model: Decoder, todo: Prepared, turn: int, on_turn: Callable | None) -> Iterator[Token]:
    job, plan, sizes, asked = todo
    title = _title("stream", job, sizes)
    with waiting_on_compiler(title):
        run = _start(model, job, plan, sizes)
    seen = np.zeros(run.requests, np.int32)
    lengths = np.asarray(job.prompt_lengths)
    while True:
        with waiting_on_compiler(title):
            run = take_steps(model, job, run, plan, np.int32(turn))
        row_request = np.asarray(run.row_request)
        live = row_request < run.requests
        if on_turn is not None:
            _tell(on_turn, run.cache.bookkeeping(), np.where(live, row_request, -1), asked)
        counts, tokens, logprobs = (np.asarray(x) for x in (run.out_lengths, run.tokens, run.logprobs))
        for request in np.flatnonzero(counts > seen):
            prompt, nth = divmod(int(request), job.num_samples)
            for i in range(seen[request], counts[request]):
                where = int(lengths[prompt]) + int(i)
                yield Token(prompt, nth, where, int(tokens[request, i]), float(logprobs[request, i]))
        seen = counts
        if not np.any(live):
            if asked is not None:
                return _cut_output(run, job, asked)
            return on_automatic_axes(lambda _, run, job: _output(run, job), job.prompts, run, job)


@functools.partial(jax.jit, static_argnames=("plan", "sizes"))
def _generate(model: Decoder, job: Job, plan: Plan, sizes: CacheConfig) -> GenerateOutput:
    def run(prompts: Array, model: Decoder, job: Job) -> GenerateOutput:
        del prompts
        return _output(advance(model, job, _new_run(model, job, plan, sizes), plan), job)

    return on_automatic_axes(run, job.prompts, model, job)


def _new_run(model: Decoder, job: Job, plan: Plan, sizes: CacheConfig) -> Run:
    cache = PagedKVCache.of_sizes(model.config, sizes, model.mesh)
    if job.draft is not None:
        cache = with_draft_pages(cache, PagedKVCache.of_sizes(job.draft.config, sizes, job.draft.mesh))
    return vary_like(start(cache, job.num_requests, plan.max_new), model, job)


@functools.partial(jax.jit, static_argnames=("plan", "sizes"))
def _start(model: Decoder, job: Job, plan: Plan, sizes: CacheConfig) -> Run:
    return within(lambda model, job: _new_run(model, job, plan, sizes), model, job)


@functools.partial(jax.jit, static_argnames=("plan",), donate_argnames=("run",))
def take_steps(model: Decoder, job: Job, run: Run, plan: Plan, turn: Array) -> Run:
    """At most `turn` steps more; the run given is used up. Every way of generating outside jit runs this program."""
    return within(lambda model, job, run: advance(model, job, run, plan, _later(run.steps, turn)), model, job, run)


def _later(steps: Array, turn: Array) -> Array:
    """steps + turn, or NEVER where int32 would overflow."""
    return jnp.minimum(steps, NEVER - turn) + turn


def _cut_output(run: Run, job: Job, asked: Asked) -> GenerateOutput:
    """`_output` without what a rung's size has added."""
    front = lambda x: cut(x, asked.num_prompts * job.num_samples, asked.max_new, groups=job.num_samples)
    return GenerateOutput(*map(front, _results(run)), _stats(run))  # pyright: ignore[reportCallIssue]


def _results(run: Run) -> tuple[Array, ...]:
    """The fields of a `GenerateOutput` but its stats, a row for each request."""
    return run.tokens, run.out_lengths, run.logprobs, run.sampled_logprobs, run.finished


def _output(run: Run, job: Job) -> GenerateOutput:
    def grouped(x: Array) -> Array:
        return x.reshape(-1, job.num_samples, *x.shape[1:])

    return GenerateOutput(*map(grouped, _results(run)), _stats(run))  # pyright: ignore[reportCallIssue]


def _stats(run: Run) -> GenerateStats:
    """Counters of a run; known ones are taken as NumPy's numbers, whose quotient compiles nothing."""
    if isinstance(run.held_slots, Tracer):
        waste = run.empty_slots / jnp.maximum(run.held_slots, 1.0)
    else:
        waste = jax.device_put(np.asarray(run.empty_slots) / np.maximum(np.asarray(run.held_slots), np.float32(1.0)))
    return GenerateStats(run.steps, run.preemptions, run.peak_pages, waste, run.nonfinite)
