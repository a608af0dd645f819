"""What `generate` was asked for and how far it is: the state that `jaxkv.decode.device_scheduler` moves forward, all of it arrays.

See there for the words request, row, missing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.decode.sampling import Sampling
from jaxkv.model.decoder import Decoder
from jaxkv.model.token_ids import ArrayLike, as_int32
from jaxkv.ops.integers import quotient
from jaxkv.ops.numerics import Numerics

CHUNK, PIECES = 256, 4
"""Prompt tokens and pieces per step, at most, unless `prefill_chunk` says otherwise. Products of more rows are hardly faster per
token, and short prompts, which come in one by one as rows end, would seldom fill more pieces (docs/measurements.md, "Size of a
prompt's chunk")."""

PIECE, LONG_PIECE, LONG = 64, 128, 512
"""Tokens of a piece of a prompt, fewer where all prompts are shorter. Prompts that may have more than `LONG` tokens come in longer
pieces: attention is then cheaper, while a last piece that is not full costs more (docs/measurements.md, "Length of a prompt's pieces")."""


class Chunk(NamedTuple):
    """Room for prompts in a step: so many pieces, each for `width` tokens of one row; none means a step of decode rows alone."""

    pieces: int = 0
    width: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return self.pieces * self.width

    @classmethod
    def holding(cls, tokens: int | None, prompt_width: int, rows: int) -> "Chunk":
        """Room for up to `tokens`; None for the default, given that many rows and prompts of up to `prompt_width` tokens."""
        piece = min(LONG_PIECE if prompt_width > LONG else PIECE, -(-prompt_width // 16) * 16)
        if tokens is None:
            return cls(min(CHUNK // piece, PIECES, rows * -(-prompt_width // piece)), piece)
        pieces = -(-tokens // piece)
        return cls(pieces, tokens // pieces)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed for a run, and static under jit.

    Attributes:
      max_new: tokens of a request's results, at most.
      chunk: room for prompts in a step that takes any.
      sampled: whether any row may sample (else it is not compiled).
      numerics: how the model is computed.
      on_token: host callback (prompt, sample, position, token), or None.
      speculation: None, or a `jaxkv.decode.speculation.Speculation`, whose step takes the place of the usual one.
    """

    max_new: int
    chunk: Chunk
    sampled: bool
    numerics: Numerics
    on_token: Callable[[int, int, int, int], None] | None = None
    speculation: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Job:
    """What was asked for; constant during a run. One entry per prompt, whose samples all share it.

    Attributes:
      prompts, prompt_lengths: token ids, each row's first `prompt_lengths` are real.
      limits: tokens to generate at most.
      keys: source of randomness, of which prompt i gets `fold_in(keys, i)` where it is one key; None where nothing is sampled.
      sampling: with arrays.
      eos: i32[n], ids that end a sequence; n may be 0. Negative ones are padding.
      num_real: i32[], how many prompts there are; those behind them are padding, and are never admitted.
      draft: a second model that guesses tokens, for `Plan.speculation`; its pages stand behind the model's in the cache.
      num_samples: requests per prompt.
    """

    prompts: Int[ArrayLike, "num_prompts width"]
    prompt_lengths: Int[ArrayLike, " num_prompts"]
    limits: Int[ArrayLike, " num_prompts"]
    keys: Key[Array, "*num_prompts"] | None
    sampling: Sampling
    eos: Int[ArrayLike, " ends"]
    num_real: Int[ArrayLike, ""]
    draft: Decoder | None = None
    num_samples: int = dataclasses.field(default=1, metadata={"static": True})

    def without_prompts(self) -> "Job":
        """The same shapes, and nothing to do."""
        return dataclasses.replace(self, num_real=as_int32(np.zeros(())))

    @property
    def num_requests(self) -> int:
        """Samples of all prompts, padding included."""
        return self.prompts.shape[0] * self.num_samples

    @property
    def real_requests(self) -> Int[Array, ""]:
        """Samples of the prompts that are no padding."""
        return self.num_real * self.num_samples

    @property
    def shares_pages(self) -> bool:
        """Whether rows may share pages: samples those of their prompt."""
        return self.num_samples > 1

    def prompt_of(self, request: Array) -> Array:
        """The prompt of each request."""
        return quotient(request, self.num_samples)

    def keys_of(self, prompt: Int[Array, " rows"]) -> Key[Array, " rows"]:
        """The key of each of these prompts: `fold_in(keys, i)` out of one key, or the i-th."""
        assert self.keys is not None
        if self.keys.ndim:
            return self.keys[prompt]
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(self.keys, prompt)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """State of a run; goes round the loop and is updated in place.

    Attributes:
      cache: of `seqs` rows.
      row_request: i32[seqs], the request in each row, or `requests` for none.
      preempted: i32[seqs], requests that wait because they were preempted, ascending, filled up with `requests`.
      next: i32[], first request never admitted.
      tokens, logprobs, sampled_logprobs: [requests, max_new], results; the latter two under the model's own distribution
        and under the sampled one.
      out_lengths: i32[requests], tokens generated.
      finished: bool[requests], ended by an end token.
      steps, preemptions, peak_pages, nonfinite: i32[], counters; the last of tokens whose logits were not finite.
      waited: i32[], row-steps that prompts were passed over since the last chunk.
      held_slots, empty_slots: f32[], slots of used pages and those of them without a token, summed over the steps.
    """

    cache: PagedKVCache
    row_request: Int[Array, " seqs"]
    preempted: Int[Array, " seqs"]
    next: Int[Array, ""]
    tokens: Int[Array, "requests max_new"]
    logprobs: Float[Array, "requests max_new"]
    sampled_logprobs: Float[Array, "requests max_new"]
    out_lengths: Int[Array, " requests"]
    finished: Bool[Array, " requests"]
    steps: Int[Array, ""]
    preemptions: Int[Array, ""]
    peak_pages: Int[Array, ""]
    nonfinite: Int[Array, ""]
    waited: Int[Array, ""]
    held_slots: Float[Array, ""]
    empty_slots: Float[Array, ""]

    @property
    def requests(self) -> int:
        """Number of requests, and the value that stands for none."""
        return self.finished.shape[0]

    @property
    def live(self) -> Array:
        """bool[seqs], rows with a request."""
        return self.row_request < self.requests

    def waiting(self, job: Job) -> Array:
        """bool[], whether a request is in no row and not done."""
        return (self.next < job.real_requests) | (self.preempted[0] < self.requests)

    def known(self, job: Job, request: Array) -> Array:
        """Tokens known of each request: its prompt and what it has generated; 0 for none."""
        length = job.prompt_lengths.at[job.prompt_of(request)].get(mode="fill", fill_value=0)
        return length + self.out_lengths.at[request].get(mode="fill", fill_value=0)

    def missing(self, job: Job) -> Array:
        """i32[seqs], known tokens of each row that are not in the cache."""
        return jnp.where(self.live, self.known(job, self.row_request) - self.cache.lengths, 0)

    def done(self, job: Job, request: Array) -> Array:
        """Which requests have all their tokens."""
        limit = job.limits.at[job.prompt_of(request)].get(mode="fill", fill_value=0)
        count = self.out_lengths.at[request].get(mode="fill", fill_value=0)
        return self.finished.at[request].get(mode="fill", fill_value=False) | (count >= limit)

    def token_at(self, job: Job, request: Array, position: Array) -> Array:
        """Known token of a request at a position."""
        prompt = job.prompt_of(jnp.minimum(request, self.requests - 1))
        length = job.prompt_lengths[prompt]
        given = job.prompts.at[prompt, position].get(mode="clip")
        made = self.tokens.at[request, position - length].get(mode="clip")
        return jnp.where(position < length, given, made)


def start(cache: PagedKVCache, num_requests: int, max_new: int) -> Run:
    """The state before anything is admitted."""
    no_request = jnp.full(cache.max_seqs, num_requests, jnp.int32)
    zero, nothing = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    shape = (num_requests, max_new)
    return Run(
        cache=cache,
        row_request=no_request,
        preempted=no_request,
        next=zero,
        tokens=jnp.full(shape, -1, jnp.int32),
        logprobs=jnp.zeros(shape, jnp.float32),
        sampled_logprobs=jnp.zeros(shape, jnp.float32),
        out_lengths=jnp.zeros(num_requests, jnp.int32),
        finished=jnp.zeros(num_requests, bool),
        steps=zero,
        preemptions=zero,
        peak_pages=zero,
        nonfinite=zero,
        waited=zero,
        held_slots=nothing,
        empty_slots=nothing,
    )
