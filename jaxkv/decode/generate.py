"""`generate`: prompts in, tokens out, as one pure function that can stand inside the caller's jit; and `stream`, its host-side twin.

Both build a `Job` and a `Run` and let `jaxkv.decode.device_scheduler` do the work.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.report import Bookkeeping
from jaxkv.config import pages_for
from jaxkv.decode.device_scheduler import advance
from jaxkv.decode.run_state import Chunk, Job, Plan, Run, start
from jaxkv.decode.sampling import Sampling
from jaxkv.decode.speculative import Draft, NGram, speculate, with_draft_pages
from jaxkv.decode.step import check_pool, check_tokens
from jaxkv.model.decoder import Decoder

MAX_SEQS = 64
"""Rows of the batch unless `max_seqs` says otherwise."""


class GenerateStats(NamedTuple):
    """How a run went: scalar arrays.

    Attributes:
      steps: passes through the model.
      preemptions: times a row was moved back to the waiting line because the pool was full.
      peak_pages: most pages in use at once.
      waste: share of the slots of used pages without a token, averaged over the steps, in [0, 1].
    """

    steps: Int[Array, ""]
    preemptions: Int[Array, ""]
    peak_pages: Int[Array, ""]
    waste: Float[Array, ""]


class GenerateOutput(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: generated ids, an end token included, padded with -1.
      lengths: how many are real.
      logprobs: of the chosen tokens under the model's own distribution (before temperature and filters), padded with 0.
      sampled_logprobs: the same under the distribution that was sampled from (after both); 0 for greedy prompts.
      finished: ended by an end token rather than by the number of tokens.
      stats: see `GenerateStats`.
    """

    tokens: Int[Array, "num_prompts num_samples max_new"]
    lengths: Int[Array, "num_prompts num_samples"]
    logprobs: Float[Array, "num_prompts num_samples max_new"]
    sampled_logprobs: Float[Array, "num_prompts num_samples max_new"]
    finished: Bool[Array, "num_prompts num_samples"]
    stats: GenerateStats

    def _repr_html_(self) -> str:
        from jaxkv.viz.output_picture import output_svg  # only here: results that nobody looks at need no pictures

        figures = ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in self.stats._asdict().items())
        return output_svg(np.asarray(self.lengths), np.asarray(self.logprobs), np.asarray(self.finished), figures)


class Token(NamedTuple):
    """One generated token, as `stream` yields it; position counts from the prompt's first token."""

    prompt: int
    sample: int
    position: int
    token: int
    logprob: float


def generate(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]],
    prompt_lengths: Int[Array | np.ndarray, " num_prompts"] | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    key: Array | None = None,
    eos_token_id: int | Sequence[int] | Array | None = None,
    num_samples: int = 1,
    token_limits: Int[Array | np.ndarray, " num_prompts"] | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    max_seqs: int | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: str | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
    on_token: Callable[[int, int, int, int], None] | None = None,
    speculative: NGram | Draft | None = None,
) -> GenerateOutput:
    """Generate from prompts of different lengths by continuous batching over a paged cache, on the device.

    `max_seqs` rows work at a time; the other prompts wait, and move in as rows end. Pages are taken as sequences grow; when
    none is left the youngest row is preempted and computed again later. A prompt's result does not depend on any of this.
    Works alone and inside the caller's `jax.jit`.

    Args:
      model: the decoder.
      prompts: token ids, right-padded (what stands in the padding does not matter), or a list of lists of ids.
      prompt_lengths: tokens of each prompt, >= 1; by default all of `prompts`.
      max_new_tokens: tokens to generate per sample, at most, >= 1.
      sampling: how to choose tokens; by default greedy.
      key: `jax.random.key`, or an array of one key per prompt. One key stands for `fold_in(key, i)` for prompt i. Sample s
        then uses `fold_in(fold_in(key_i, s), position)` at each position. Needed unless everything is greedy.
      eos_token_id: id or ids that end a sequence; the id itself is part of the result.
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
    sampling = Sampling() if sampling is None else sampling
    prompts, prompt_lengths = pad_prompts(prompts, prompt_lengths)
    job, plan, sizes = _prepare(
        model, prompts, prompt_lengths, max_new_tokens, sampling, key, eos_token_id, num_samples, token_limits, page_size,
        num_pages, max_seqs, prefill_chunk, cache_dtype, deterministic, implementation, speculative, on_token,
    )  # fmt: skip
    return _generate(model, job, plan, sizes, max_new_tokens)


def stream(
    model: Decoder,
    prompts: Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]],
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
    prompts, prompt_lengths = pad_prompts(prompts, prompt_lengths)
    options.setdefault("sampling", Sampling())
    names = (
        "max_new_tokens", "sampling", "key", "eos_token_id", "num_samples", "token_limits", "page_size", "num_pages",
        "max_seqs", "prefill_chunk", "cache_dtype", "deterministic", "implementation", "speculative",
    )  # fmt: skip
    unknown = set(options) - set(names)
    if unknown or "max_new_tokens" not in options:
        raise TypeError(f"stream() got unknown arguments {sorted(unknown)}" if unknown else "stream() needs max_new_tokens")
    defaults = {"num_samples": 1, "page_size": 16, "deterministic": False}
    values = [options.get(name, defaults.get(name)) for name in names]
    job, plan, sizes = _prepare(model, prompts, prompt_lengths, *values, None)  # pyright: ignore[reportCallIssue]
    return _stream(model, job, plan, sizes, options["max_new_tokens"], steps_per_turn, on_turn)


def _stream(
    model: Decoder, job: Job, plan: Plan, sizes: "_Sizes", max_new: int, turn: int, on_turn: Callable | None
) -> Iterator[Token]:
    run = _start(model, job, plan, sizes, max_new)
    seen = np.zeros(run.requests, np.int32)
    lengths = np.asarray(job.prompt_lengths)
    while True:
        run = _advance(model, job, run, plan, run.steps + turn)
        if on_turn is not None:
            on_turn(run.cache.bookkeeping(), np.where(run.live, run.row_request, -1))
        counts, tokens, logprobs = (np.asarray(x) for x in (run.out_lengths, run.tokens, run.logprobs))
        for request in np.flatnonzero(counts > seen):
            prompt, nth = divmod(int(request), plan.num_samples)
            for i in range(seen[request], counts[request]):
                where = int(lengths[prompt]) + int(i)
                yield Token(prompt, nth, where, int(tokens[request, i]), float(logprobs[request, i]))
        seen = counts
        if not np.any(np.asarray(run.live)):
            return _output(run, plan)


class _Sizes(NamedTuple):
    """Arguments of the cache; static under jit."""

    num_pages: int
    page_size: int
    max_seqs: int
    max_seq_len: int
    dtype: str | None


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _generate(model: Decoder, job: Job, plan: Plan, sizes: _Sizes, max_new: int) -> GenerateOutput:
    return _output(advance(model, job, _new_run(model, job, plan, sizes, max_new), plan), plan)


def _new_run(model: Decoder, job: Job, plan: Plan, sizes: _Sizes, max_new: int) -> Run:
    cache = PagedKVCache.create(model.config, **sizes._asdict())
    if job.draft is not None:
        cache = with_draft_pages(cache, PagedKVCache.create(job.draft.config, **sizes._asdict()))
    return start(cache, job.prompts.shape[0] * plan.num_samples, max_new)


_start = jax.jit(_new_run, static_argnums=(2, 3, 4))
_advance = functools.partial(jax.jit, static_argnums=(3,), donate_argnums=(2,))(advance)


def _output(run: Run, plan: Plan) -> GenerateOutput:
    def grouped(x: Array) -> Array:
        return x.reshape(-1, plan.num_samples, *x.shape[1:])

    waste = run.empty_slots / jnp.maximum(run.held_slots, 1.0)
    stats = GenerateStats(run.steps, run.preemptions, run.peak_pages, waste)
    results = (run.tokens, run.out_lengths, run.logprobs, run.sampled_logprobs, run.finished)
    return GenerateOutput(*map(grouped, results), stats)  # pyright: ignore[reportCallIssue]


def pad_prompts(
    prompts: Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]],
    lengths: Int[Array | np.ndarray, " num_prompts"] | None = None,
) -> tuple[Array, Array]:
    """Prompts as an array and their lengths; lists of ids are padded on the right with 0.

    Raises:
      ValueError: no prompts, an empty one, or lengths that do not fit.
    """
    if isinstance(prompts, (list, tuple)):
        if lengths is not None:
            raise ValueError("prompt_lengths goes with an array of prompts; lists have lengths of their own")
        if not prompts:
            raise ValueError("prompts are empty: there must be at least one, of at least one token")
        lengths = np.asarray([len(p) for p in prompts], np.int32)
        prompts = np.asarray([[*p, *[0] * (max(lengths) - len(p))] for p in prompts], np.int32).reshape(len(lengths), -1)
    prompts = jnp.asarray(prompts)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(f"prompts must be integers [num_prompts, width], got {prompts.dtype}{list(prompts.shape)}")
    if 0 in prompts.shape:
        raise ValueError(f"prompts are empty (shape {list(prompts.shape)}): every prompt needs at least one token")
    lengths = jnp.full(prompts.shape[0], prompts.shape[1], jnp.int32) if lengths is None else jnp.asarray(lengths)
    if lengths.shape != (prompts.shape[0],):
        raise ValueError(f"prompt_lengths must be [num_prompts] = [{prompts.shape[0]}], got shape {list(lengths.shape)}")
    if not isinstance(lengths, Tracer):
        wrong = np.flatnonzero((np.asarray(lengths) < 1) | (np.asarray(lengths) > prompts.shape[1]))
        if wrong.size:
            raise ValueError(f"prompt {wrong[0]} has length {lengths[wrong[0]]}, but must have 1 to {prompts.shape[1]} tokens")
    return prompts.astype(jnp.int32), lengths.astype(jnp.int32)


def _prepare(
    model: Decoder, prompts: Array, lengths: Array, max_new: int, sampling: Sampling, key: Array | None, eos, num_samples: int,
    token_limits: Array | np.ndarray | None, page_size: int, num_pages: int | None, max_seqs: int | None, prefill_chunk: int | None,
    cache_dtype: str | None, deterministic: bool, implementation: str | None,
    speculative: NGram | Draft | None, on_token: Callable | None,
) -> tuple[Job, Plan, _Sizes]:  # fmt: skip
    """Check all arguments, and sort them into traced and static ones."""
    num_prompts, width = prompts.shape
    given = dict(
        max_new_tokens=max_new, num_samples=num_samples, page_size=page_size, max_seqs=max_seqs, prefill_chunk=prefill_chunk
    )
    for name, n in given.items():
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {n!r}")
    longest = _longest(model, lengths, width, max_new)
    real = jnp.arange(width)[None, :] < lengths[:, None]
    check_tokens(jnp.where(real, prompts, 0), model.config.vocab_size)
    max_seqs = min(num_prompts * num_samples, MAX_SEQS) if max_seqs is None else max_seqs
    if num_pages is None:
        num_pages = max_seqs * pages_for(longest, page_size) + 1
    check_pool(num_pages, page_size, longest, f"a prompt of up to {longest - max_new} and {max_new} new ones")
    if token_limits is None:
        limits = jnp.full(num_prompts, max_new, jnp.int32)
    else:
        limits = jnp.asarray(token_limits, jnp.int32)
        if limits.shape != (num_prompts,):
            raise ValueError(f"token_limits must be [num_prompts] = [{num_prompts}], got shape {list(limits.shape)}")
        if not isinstance(limits, Tracer):
            wrong = np.flatnonzero((np.asarray(limits) < 1) | (np.asarray(limits) > max_new))
            if wrong.size:
                raise ValueError(f"token_limits[{wrong[0]}] is {limits[wrong[0]]}, but must be 1 to max_new_tokens = {max_new}")
        limits = jnp.clip(limits, 1, max_new)
    chunk = Chunk.holding(prefill_chunk, width, max_seqs)
    greedy = sampling.always_greedy
    job = Job(prompts, lengths, limits, prompt_keys(key, num_prompts, greedy), sampling.per_row(num_prompts), end_ids(eos))
    plan = Plan(num_samples, chunk, not greedy, implementation, deterministic, on_token)
    if speculative is not None:
        job, plan = speculate(speculative, model, longest, job, plan)
    return job, plan, _Sizes(num_pages, page_size, max_seqs, longest, cache_dtype)


def _longest(model: Decoder, lengths: Array, width: int, max_new: int) -> int:
    """Tokens the longest sequence may get to; a static number, so that lengths which are known do not recompile."""
    allowed = model.config.max_seq_len
    known = width if isinstance(lengths, Tracer) else int(np.max(np.asarray(lengths)))
    if known + max_new > allowed:
        raise ValueError(
            f"a prompt of {known} tokens and {max_new} new ones are {known + max_new}, but the model allows {allowed}: shorten "
            "the prompt or max_new_tokens"
        )
    return min(width + max_new, allowed)


def prompt_keys(key: Array | None, num_prompts: int, greedy: bool) -> Array:
    """One key per prompt, out of one key or as they are given; some key where none is needed.

    Raises:
      ValueError: there is none and it is needed, or their number is wrong.
    """
    if key is None and not greedy:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    keys: Array = jax.random.key(0) if key is None else key
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(keys)  # an old-style uint32 key
    if keys.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys, jnp.arange(num_prompts))
    if keys.shape != (num_prompts,):
        raise ValueError(f"key must be one key or one per prompt ({num_prompts}), got shape {list(keys.shape)}")
    return keys


def end_ids(eos: int | Sequence[int] | Array | None) -> Array:
    """End tokens as i32[n]; n is 0 for None."""
    return jnp.zeros(0, jnp.int32) if eos is None else jnp.atleast_1d(jnp.asarray(eos, jnp.int32))
