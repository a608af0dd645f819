"""What the engine was asked for and how far it is: a `Request` of a user, and its samples, each of them a `Sequence` that can be in a row.

    tokens of a sequence    | prompt ............ | output ....... | in flight |
    computed                | in the cache, or will be when the steps that were dispatched are done |
    missing                 what lies between: one token means decode, more mean prefill, in pieces

A token that was drawn stays on the device at first; the host reads it one step later. Until then it is *in flight*: the sequence has it,
but its value is not known here.

Host only: no jax.
"""

import dataclasses
import itertools
from collections.abc import Sequence as Tokens

from jaxkv.engine.params import SamplingParams


@dataclasses.dataclass
class Metrics:
    """When what happened to a request, in seconds of `time.monotonic`, and what it cost.

    Attributes:
      arrival_time, first_scheduled_time, first_token_time, finished_time: None while it has not happened.
      preemptions: how often one of its samples lost its pages to an older one, and was computed again.
      prefilled_tokens: tokens of prompts that were computed, those computed again included.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    prefilled_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclasses.dataclass(eq=False)
class Request:
    """What a user asked for.

    Attributes:
      request_id: of the user's.
      prompt: its text, if it was one.
      prompt_token_ids: tokens of the prompt, at least one.
      params: how it is answered.
      limit: tokens of an answer, at most.
      number: how many requests came before it.
      priority: less is served earlier.
      salt: under which its pages are shared.
      root: parent of the names of its pages in the prefix cache.
      ends: tokens that end an answer, but for those in `params.stop_token_ids`.
      seed: what its tokens are drawn with: a seed, and a number that the seed's key is folded with, or -1.
      samples: its sequences.
      metrics: when what happened.
      cached: tokens of the prompt that the prefix cache held when the first sample came to a row; None before.
      weights: the versions of the weights that its answer was computed with, in order; more than one where it went on with new ones.
      restarts: how often its answer was begun anew with new weights.
      prompt_logprobs: of the prompt's tokens, where they were asked for and all of them are computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    limit: int
    number: int
    priority: int
    salt: str | None
    root: bytes
    ends: frozenset[int]
    seed: tuple[int, int]
    metrics: Metrics
    samples: "list[Sequence]" = dataclasses.field(default_factory=list)
    cached: int | None = None
    weights: list[int] = dataclasses.field(default_factory=list)
    restarts: int = 0
    prompt_logprobs: list | None = None

    def __post_init__(self):
        self.samples = [Sequence(self, index) for index in range(self.params.n)]

    @property
    def finished(self) -> bool:
        """Whether all samples are."""
        return all(sequence.finish_reason is not None for sequence in self.samples)

    @property
    def mixed_weights(self) -> bool:
        """Whether its pages hold what different weights have computed, so that nobody else can use them."""
        return len(self.weights) > 1

    @property
    def whole_prompt(self) -> bool:
        """Whether every position's logits of the prompt are needed, so that no page of it can come from the prefix cache."""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs is None


@dataclasses.dataclass(eq=False)
class Sequence:
    """One sample of a request.

    Attributes:
      request: whose sample it is.
      index: which one.
      output: tokens of the answer, as far as their values are known.
      in_flight: tokens that were drawn and not read yet.
      computed: tokens in the cache, those of dispatched steps included.
      pages: pages it holds, in order of position.
      names: names of its whole pages in the prefix cache.
      committed: how many of its pages the prefix cache has been told.
      row: its place in the batch, or None while it waits.
      logprobs: of the output's tokens, where they were asked for.
      cumulative_logprob: sum of the log-probabilities of the output's tokens.
      finish_reason: None while it runs; "stop", "length", "abort" or "error".
      stop_reason: the stop token or text that ended it, None for the model's own end tokens.
    """

    request: Request
    index: int
    output: list[int] = dataclasses.field(default_factory=list)
    in_flight: int = 0
    computed: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    names: list[bytes] = dataclasses.field(default_factory=list)
    committed: int = 0
    row: int | None = None
    logprobs: list | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self):
        if self.request.params.logprobs is not None:
            self.logprobs = []

    @property
    def order(self) -> tuple[int, int, int]:
        """Who is served first: the least."""
        return (self.request.priority, self.request.number, self.index)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def length(self) -> int:
        """Tokens that there are, those in flight included."""
        return self.prompt_length + len(self.output) + self.in_flight

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache."""
        return self.length - self.computed

    @property
    def remaining(self) -> int:
        """Tokens that may still be drawn."""
        return self.request.limit - len(self.output) - self.in_flight

    def token_at(self, position: int) -> int:
        """A token whose value is known."""
        prompt = self.request.prompt_token_ids
        return prompt[position] if position < len(prompt) else self.output[position - len(prompt)]

    def tokens(self, begin: int, end: int) -> Tokens[int]:
        """Tokens whose values are known, from position `begin` to before `end`."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[begin:end]
        return list(itertools.islice(itertools.chain(prompt, self.output), begin, end))

    def leave_row(self) -> None:
        """It has neither row nor pages any more, and nothing of it is computed."""
        self.row, self.pages, self.computed, self.committed = None, [], 0, 0

    def begin_anew(self) -> None:
        """Nothing of its answer is there any more."""
        self.output, self.cumulative_logprob = [], 0.0
        self.logprobs = None if self.logprobs is None else []

    @property
    def known(self) -> int:
        """Tokens whose values are known."""
        return self.prompt_length + len(self.output)
