"""What a beam search was asked for: arrays, what is static, and how many pages it takes."""

from typing import NamedTuple

import numpy as np
from jax.core import Tracer

from jaxkv.cache.pages import page_bytes
from jaxkv.config import CacheConfig, pages_for
from jaxkv.decode.beams import Rules, candidates
from jaxkv.decode.prompts import longest_known, longest_sequence
from jaxkv.decode.run_state import Chunk
from jaxkv.decode.rungs import pad
from jaxkv.model.decoder import Decoder
from jaxkv.model.token_ids import ArrayLike
from jaxkv.ops.numerics import Numerics
from jaxkv.programs import ladder


class Search(NamedTuple):
    """What is fixed, and static under jit."""

    num_beams: int
    max_new: int
    num_return: int
    chunk: int
    numerics: Numerics


class BeamJob(NamedTuple):
    """What was asked for, as arrays; prompts behind the first `num_real` are padding."""

    prompts: ArrayLike
    lengths: ArrayLike
    rules: Rules
    eos: ArrayLike
    num_real: ArrayLike


def _pages_needed(length: int, search: Search, page_size: int) -> int:
    """Pages for one prompt: its full ones, which the beams share, and each beam's own. The last token is never computed."""
    if search.max_new == 1:
        return pages_for(length, page_size)
    shared = length // page_size
    return shared + search.num_beams * (pages_for(length + search.max_new - 1, page_size) - shared)


def _all_pages(lengths: ArrayLike, width: int, search: Search, page_size: int) -> int:
    """Pages for all prompts, of `width` tokens each where that is not known, and the null page."""
    known = [width] * lengths.shape[0] if isinstance(lengths, Tracer) else np.asarray(lengths).tolist()
    return sum(_pages_needed(n, search, page_size) for n in known) + 1


def cache_sizes(
    model: Decoder, lengths: ArrayLike, width: int, search: Search, page_size: int, num_pages: int | None
) -> CacheConfig:
    """Sizes of the cache, from the width of `prompts` and not from `lengths`, so that other lengths do not recompile."""
    longest = longest_sequence(model.config, lengths, width, search.max_new)
    width, num_prompts = longest - search.max_new, lengths.shape[0]
    most = max(_pages_needed(n, search, page_size) for n in range(max(1, width - page_size), width + 1))
    enough = num_prompts * most + 1
    need = enough if isinstance(lengths, Tracer) else _all_pages(lengths, width, search, page_size)
    if num_pages is not None and num_pages < need:
        known = longest_known(lengths, width)
        raise ValueError(
            f"num_pages is {num_pages}, but {search.num_beams} beams of each of {num_prompts} prompts of up to {known} "
            f"tokens and {search.max_new} new ones need {need} pages of {page_size} tokens, the null page included"
        )
    rows = num_prompts * search.num_beams
    return CacheConfig(enough if num_pages is None else num_pages, page_size, rows, longest)


def on_a_rung(
    model: Decoder, job: BeamJob, search: Search, sizes: CacheConfig, given: tuple[bool, bool]
) -> tuple[BeamJob, Search, CacheConfig]:
    """Job, search and sizes of the rung above; `given` says whether the pool and the chunk are the caller's."""
    allowed, num_prompts = model.config.max_seq_len, job.prompts.shape[0]
    longest = longest_known(job.lengths, job.prompts.shape[1])
    width, room = ladder.prompt(longest, allowed), ladder.sequence(longest + search.max_new, allowed)
    prompts, ends = ladder.rows(num_prompts), ladder.ends(job.eos.shape[0])
    ends = ends if candidates(1, ends) <= model.config.vocab_size else job.eos.shape[0]
    num_pages = sizes.num_pages
    if not given[0]:
        needed = _all_pages(job.lengths, longest, search, sizes.page_size)
        most = prompts * search.num_beams * pages_for(room, sizes.page_size) + 1
        num_pages = ladder.pages(needed, page_bytes((model.config,), sizes.page_size, sizes.dtype), most)
    job = job._replace(
        prompts=pad(job.prompts, prompts, width), lengths=pad(job.lengths, prompts, fill=1), eos=pad(job.eos, ends, fill=-1)
    )
    chunk = search.chunk if given[1] else Chunk.holding(None, width, 1).tokens
    search = search._replace(max_new=room, num_return=search.num_beams, chunk=chunk)
    return job, search, CacheConfig(num_pages, sizes.page_size, prompts * search.num_beams, room)
