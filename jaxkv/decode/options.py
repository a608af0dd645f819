"""The arguments of `generate` as one value, their checks, and what becomes of them: traced ones a `Job`, static ones a `Plan`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from jaxkv.config import CacheConfig, ModelConfig, check_cache_dtype, integer, pages_for, shown
from jaxkv.decode.prompts import (
    Ends,
    check_flags,
    check_pool,
    end_tokens,
    longest_sequence,
    numerics_of,
    pad_prompts,
    read_keys,
    token_limits,
)
from jaxkv.decode.run_state import Chunk, Job, Plan
from jaxkv.decode.rungs import MAX_SEQS, Asked, on_a_rung, shapes_are_the_callers
from jaxkv.decode.sampling import Sampling, as_sampling
from jaxkv.decode.speculative import Draft, NGram, speculate
from jaxkv.model.decoder import check_decoder
from jaxkv.model.token_ids import ArrayLike, as_int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The keyword arguments of `generate`; see there. Those that say how much are integers from here on.

    Raises:
      ValueError: one is of another kind.
    """

    max_new_tokens: int
    sampling: Sampling | None = None
    key: Array | None = None
    eos_token_id: Ends = None
    num_samples: int = 1
    token_limits: Int[Array | np.ndarray, " num_prompts"] | None = None
    page_size: int = 16
    num_pages: int | None = None
    max_seqs: int | None = None
    prefill_chunk: int | None = None
    cache_dtype: str | None = None
    deterministic: bool = False
    implementation: str | None = None
    on_token: Callable[[int, int, int, int], None] | None = None
    speculative: NGram | Draft | None = None

    def __post_init__(self):
        required = {"max_new_tokens": 1, "num_samples": 1, "page_size": 1}
        for name, least in {**required, "num_pages": 0, "max_seqs": 1, "prefill_chunk": 1}.items():
            value = getattr(self, name)
            if value is not None or name in required:
                object.__setattr__(self, name, integer(name, value, least))
        check_flags(deterministic=self.deterministic)
        check_cache_dtype("cache_dtype", self.cache_dtype)
        if self.on_token is not None and not callable(self.on_token):
            raise ValueError(f"on_token must be a function of (prompt, sample, position, token), got {shown(self.on_token)}")

    @classmethod
    def of(cls, function: str, options: dict[str, Any]) -> "GenerateOptions":
        """The options of a function that hands its keyword arguments on.

        Raises:
          TypeError: one is unknown, or `max_new_tokens` is missing.
        """
        unknown = options.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise TypeError(f"{function}() got unknown arguments {sorted(unknown)}")
        if "max_new_tokens" not in options:
            raise TypeError(f"{function}() needs max_new_tokens")
        return cls(**options)


class Prepared(NamedTuple):
    """What there is to do.

    Attributes:
      job: what was asked for, as arrays.
      plan, sizes: what is static under jit.
      asked: what results are cut back to where the shapes are those of a rung; None where they are the caller's.
    """

    job: Job
    plan: Plan
    sizes: CacheConfig
    asked: Asked | None


def read_job(config: ModelConfig, prompts: ArrayLike, lengths: ArrayLike, options: GenerateOptions) -> Job:
    """What was asked for, as arrays, of prompts that have been read.

    Raises:
      ValueError: as `generate`.
    """
    num_prompts, sampling = prompts.shape[0], as_sampling(options.sampling)
    return Job(
        prompts=prompts,
        prompt_lengths=lengths,
        limits=token_limits(options.token_limits, num_prompts, options.max_new_tokens),
        keys=read_keys(options.key, num_prompts, greedy=sampling.always_greedy),
        sampling=sampling.per_row(num_prompts),
        eos=end_tokens(config, options.eos_token_id),
        num_real=as_int32(np.asarray(num_prompts)),
        num_samples=options.num_samples,
    )


def prepare(model: Any, prompts: Any, lengths: Any, options: GenerateOptions) -> Prepared:
    """Check all arguments, sort them into traced and static ones and, outside a caller's jit, bring them to a rung of the ladder.

    Raises:
      ValueError: as `generate`.
    """
    check_decoder(model)
    o, config = options, model.config
    prompts, lengths = pad_prompts(prompts, lengths, config.vocab_size)
    num_prompts, width = prompts.shape
    longest = longest_sequence(config, lengths, width, o.max_new_tokens)
    max_seqs = min(num_prompts * o.num_samples, MAX_SEQS) if o.max_seqs is None else o.max_seqs
    num_pages = max_seqs * pages_for(longest, o.page_size) + 1 if o.num_pages is None else o.num_pages
    what = f"a prompt of up to {longest - o.max_new_tokens} and {o.max_new_tokens} new ones"
    check_pool(num_pages, o.page_size, longest, what)
    job = read_job(config, prompts, lengths, o)
    chunk = Chunk.holding(o.prefill_chunk, width, max_seqs)
    plan = Plan(o.max_new_tokens, chunk, job.keys is not None, numerics_of(o.implementation, o.deterministic), o.on_token)
    if o.speculative is not None:
        job, plan = speculate(o.speculative, model, longest, job, plan)
    sizes = CacheConfig(num_pages, o.page_size, max_seqs, longest, o.cache_dtype)
    if shapes_are_the_callers(dataclasses.replace(job, draft=None)):
        return Prepared(job, plan, sizes, None)
    asked = Asked(num_prompts, o.max_new_tokens, sizes.max_seqs, sizes.pages_per_seq)
    return Prepared(*on_a_rung(config, job, plan, sizes, o), asked)
