"""What an engine gives back: `RequestOutput` and what it is made of, under vLLM's names.

Host only: no jax.
"""

import dataclasses

from jaxkv.engine.sequence import Metrics


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, under the model's own distribution (before temperature and filters).

    Attributes:
      logprob: natural logarithm, <= 0.
      rank: 1 for the most probable token.
      decoded_token: its text; None without a tokenizer, or where no text was asked for.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One sample of an answer.

    Attributes:
      index: which sample.
      text: of its tokens; "" without text (`detokenize=False`).
      token_ids: tokens, the one that ended it included.
      cumulative_logprob: sum of the log-probabilities of all its tokens.
      logprobs: for each token, that of the token and of the most probable ones by id; None where they were not asked for.
      finish_reason: None while it runs; "stop" for an end token, a stop token or a stop text; "length" for `max_tokens` or no more room;
        "abort"; "error".
      stop_reason: the stop token or stop text; None where the model's own end token ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """How far a request is.

    Attributes:
      request_id: as given, or made up.
      prompt: its text, if it was one.
      prompt_token_ids: its tokens.
      outputs: its samples, all of them where everything is given, else those with something new.
      finished: whether nothing more comes.
      prompt_logprobs: for each token of the prompt, None for the first one; None where they were not asked for.
      num_cached_tokens: tokens of the prompt that were not computed, because the prefix cache held them.
      metrics: when what happened.
      weights_versions: the versions of the weights that it was computed with (see `LLM.update_params`), the first one being 0; more than
        one where it went on with new ones.
      restarts: how often it was begun anew with new weights.
      error: what went wrong, where its samples' finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: Metrics | None = None
    weights_versions: tuple[int, ...] = ()
    restarts: int = 0
    error: BaseException | None = None
