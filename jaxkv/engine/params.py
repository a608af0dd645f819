"""`SamplingParams`: how one request is to be answered, under vLLM's names.

Host only: no jax. What is not supported is refused by name, before any work.
"""

import dataclasses
import enum
import math
import operator
from collections.abc import Sequence
from typing import Any

MAX_LOGPROBS = 20
"""Alternatives of a token whose log-probabilities can be asked for, at most."""
MAX_BANNED = 64
"""End tokens and stop tokens of a request with `min_tokens`, at most."""


class RequestOutputKind(enum.Enum):
    """What an engine's outputs hold: everything so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_NOT_YET: dict[str, tuple] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (None,),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "logits_processors": (None, [], ()),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "truncate_prompt_tokens": (None,),
    "extra_args": (None, {}),
}
"""Arguments that change what is generated and are not supported, with the values that change nothing."""


@dataclasses.dataclass
class SamplingParams:
    """How a request is answered. The names, meanings and defaults are vLLM's.

    Args:
      n: samples; each is drawn on its own, their prompt is computed once.
      temperature: logits are divided by it; 0 is greedy.
      top_p: keep the most probable tokens whose probabilities add up to at least this, in (0, 1].
      top_k: keep the k most probable tokens; 0 and -1 keep all.
      min_p: keep tokens at least this share as probable as the most probable one, in [0, 1].
      seed: the same seed draws the same tokens, whatever else runs; any integer, taken modulo 2^32. None is another one for each request.
      stop: text or texts that end an answer; they may begin and end within tokens.
      stop_token_ids: token ids that end an answer; they are part of `token_ids`, not of the text.
      include_stop_str_in_output: whether the text ends with the stop text, or before it.
      ignore_eos: go on behind the model's end tokens.
      max_tokens: tokens of an answer, at most; None is as many as there is room for.
      min_tokens: no end token and no stop token is drawn before so many tokens, and no stop text ends the answer.
      logprobs: log-probabilities of so many most probable tokens at each position, and of the one that was drawn; 0 is of that one alone,
        None of none. They are the model's own, before temperature and filters.
      prompt_logprobs: the same for the tokens of the prompt; such a prompt is computed as a whole, whatever the prefix cache holds.
      detokenize: whether text is made; without it there is none, and `stop` cannot be used.
      skip_special_tokens: leave special tokens out of the text.
      output_kind: what the outputs of an engine's steps hold.
      presence_penalty, frequency_penalty, repetition_penalty, logit_bias, bad_words, allowed_token_ids, logits_processors,
        structured_outputs, guided_decoding, truncate_prompt_tokens, extra_args: not supported yet; a value that would change something is
        refused.

    Raises:
      ValueError: a value is out of range, or asks for what is not supported; the message names it.
    """

    n: int = 1
    presence_penalty: int | float = 0.0
    frequency_penalty: int | float = 0.0
    repetition_penalty: int | float = 1.0
    temperature: int | float = 1.0
    top_p: int | float = 1.0
    top_k: int = 0
    min_p: int | float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Any = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self):
        for name, harmless in _NOT_YET.items():
            value = getattr(self, name)
            if not any(value is x or (type(value) in (int, float, list, tuple, dict) and value == x) for x in harmless):
                raise ValueError(f"{name}={value!r} is not supported yet; leave it out")
        self._check_numbers()
        self.stop = _texts("stop", self.stop)
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop texts are looked for in the text: they need detokenize=True")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, which is more than max_tokens={self.max_tokens}")

    def _check_numbers(self) -> None:
        rules = {
            "n": (True, 1, 2**16),
            "max_tokens": (True, 1, 2**31 - 1),
            "min_tokens": (True, 0, 2**31 - 1),
            "top_k": (True, -1, 2**31 - 1),
            "logprobs": (True, 0, MAX_LOGPROBS),
            "prompt_logprobs": (True, 0, MAX_LOGPROBS),
            "seed": (True, -(2**63), 2**64 - 1),
            "temperature": (False, 0.0, 3.4e38),
            "top_p": (False, 0.0, 1.0),
            "min_p": (False, 0.0, 1.0),
        }
        optional = {"max_tokens", "logprobs", "prompt_logprobs", "seed"}
        for name, (whole, least, most) in rules.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            setattr(self, name, _number(name, value, whole, least, most))
        if self.top_p == 0:
            raise ValueError("top_p must be in (0, 1], got 0.0: for the most probable token alone take temperature=0")
        self.top_k = max(self.top_k, 0)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def clone(self) -> "SamplingParams":
        """A copy, for whoever wants to change it."""
        return dataclasses.replace(self)


def _number(name: str, value: Any, whole: bool, least: int | float, most: int | float) -> Any:
    given: Any = value
    try:  # NumPy's numbers are numbers, a text is none
        given = None if isinstance(value, bool | str | bytes) else operator.index(value) if whole else float(value)
    except (TypeError, ValueError):
        given = None
    if given is None or not math.isfinite(given) or not least <= given <= most:
        kind = "an integer" if whole else "a number"
        raise ValueError(f"{name} must be {kind} from {least:g} to {most:g}, got {value!r}")
    return given


def _texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list | tuple | set | frozenset) or any(not isinstance(text, str) or not text for text in texts):
        raise ValueError(f"{name} must be a text or a list of texts, none of them empty, got {value!r}")
    return list(texts)


def _ids(name: str, value: Any) -> list[int]:
    if value is None:
        return []
    try:
        ids = [] if isinstance(value, str | bytes) else [operator.index(x) for x in value if not isinstance(x, bool)]
    except TypeError:
        ids = [-1]
    if isinstance(value, str | bytes) or min(ids, default=0) < 0 or len(ids) < len(value):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return ids
