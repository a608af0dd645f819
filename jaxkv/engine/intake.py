"""What a user asks for, read and checked before anything is done for it."""

import time
from collections.abc import Sequence as List
from typing import Any, NamedTuple

from jaxkv.config import ModelConfig
from jaxkv.engine.batch import Limits
from jaxkv.engine.options import EngineOptions
from jaxkv.engine.params import MAX_BANNED, SamplingParams
from jaxkv.engine.prefix_cache import root_name
from jaxkv.engine.sequence import Metrics, Request
from jaxkv.text.chat import end_tokens


class Asked(NamedTuple):
    """What goes with a prompt; see `Engine.add_request`."""

    request_id: str
    prompt_text: str | None
    priority: int
    cache_salt: str | None


class Intake:
    """Makes requests out of what users give.

    Args:
      config: of the model.
      tokenizer: a transformers tokenizer, or None.
      options: of the engine.
      limits: sizes that follow from them.
    """

    def __init__(self, config: ModelConfig, tokenizer: Any, options: EngineOptions, limits: Limits):
        self._tokenizer, self._options, self._vocab = tokenizer, options, config.vocab_size
        self._longest = limits.max_model_len
        self._ends = frozenset(end_tokens(tokenizer, config.eos_token_ids, vocab_size=config.vocab_size))

    def request(self, prompt: str | List[int], params: Any, asked: Asked, number: int, weights_version: int) -> Request:
        """A request, as yet in no queue.

        Args:
          prompt: a text, or token ids.
          params: its `SamplingParams`.
          asked: what goes with it.
          number: how many requests came before.
          weights_version: of the weights that will answer it.

        Raises:
          ValueError: as `Engine.add_request`.
        """
        ids = self._prompt(prompt)
        self._check_params(params)
        room, salt = self._longest - len(ids), asked.cache_salt
        if not self._options.enable_prefix_caching:
            salt = f"request {number}"  # its own samples share pages all the same
        return Request(
            request_id=asked.request_id,
            prompt=prompt if isinstance(prompt, str) else asked.prompt_text,
            prompt_token_ids=ids,
            params=params,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            number=number,
            priority=asked.priority,
            salt=salt,
            root=root_name(salt, weights_version),
            ends=frozenset() if params.ignore_eos else self._ends,
            seed=(self._options.seed % 2**32, number) if params.seed is None else (params.seed % 2**32, -1),
            metrics=Metrics(time.monotonic()),
            weights=[weights_version],
        )

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("a prompt that is a text needs a tokenizer: there is none, so give token ids")
            prompt = self._tokenizer(prompt)["input_ids"]
        ids = list(prompt)
        wrong = [x for x in ids if isinstance(x, bool) or not hasattr(x, "__index__") or not 0 <= int(x) < self._vocab]
        if wrong:
            raise ValueError(f"{wrong[0]!r} in the prompt is no token of the model: ids go from 0 to {self._vocab - 1}")
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        if len(ids) >= self._longest:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and leaves no room for an answer: max_model_len is {self._longest}, prompt and answer "
                "together"
            )
        return [int(x) for x in ids]

    def _check_params(self, params: Any) -> None:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a jaxkv.SamplingParams, got {params!r}")
        stops = params.stop_token_ids or ()
        if params.stop and self._tokenizer is None:
            raise ValueError("stop texts need a tokenizer: there is none, so give stop_token_ids")
        if any(token >= self._vocab for token in stops):
            raise ValueError(f"stop_token_ids {list(stops)} go beyond the vocabulary of {self._vocab} tokens")
        if params.min_tokens and len({*stops, *self._ends}) > MAX_BANNED:
            raise ValueError(f"with min_tokens there may be {MAX_BANNED} end tokens and stop_token_ids together, at most")
