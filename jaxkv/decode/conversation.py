"""A conversation on one cache: of each new history only the tokens that the cache does not hold yet are computed.

    in the cache   | system | question 1 | answer 1 | question 2 | answer 2 (interrupted)
    new history    | system | question 1 | answer 1 | question 2 | answer 2 <end> | question 3 | assistant:
                   '------- common prefix: kept ------------------------------'---- prefilled -----------'

Templates may rewrite earlier turns, and the oldest turns may be dropped: then the common prefix is shorter, and nothing else changes.
Every answer is a run of `jaxkv.decode.device_scheduler` whose only request is in its row from the beginning, on a cache that holds the
prefix. All sizes are those of the conversation, so that all answers share one program; how many tokens there are is data.
"""

import dataclasses
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import CacheConfig, integer, pages_for, shown
from jaxkv.decode.generate import take_steps
from jaxkv.decode.outputs import Token
from jaxkv.decode.prompts import Ends, end_tokens, numerics_of, read_keys
from jaxkv.decode.run_state import Chunk, Job, Plan, Run, start
from jaxkv.decode.sampling import Sampling, as_sampling
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.token_ids import Names, as_int32, check_tokens, read_rectangle
from jaxkv.programs import waiting_on_compiler
from jaxkv.sharding import within

CONTEXT = 2048
"""Tokens of a conversation, unless `max_seq_len` says otherwise; the model may allow fewer."""

PREFILL_CHUNK = 64
"""A turn is short. Native kernels compute only the tokens that a chunk holds; with XLA's forms a chunk costs the same however full it
is, and a longer one would mostly be padding."""

_WAY_OUT = "tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) gives them"
_NAMES = Names("tokens", "lengths", "history")


class Conversation:
    """One sequence that grows, is cut and grows again: answers to a history of token ids, on a cache that stays.

    Each `answer` takes the whole history as the template has it. What the cache holds of it is kept, as far as the tokens agree; the
    rest is computed. The first answer compiles; all later ones, of whatever length, run the same program. The tokens are those that
    `generate` gives for the whole history and the same key.

    Args:
      model: the decoder.
      max_seq_len: tokens of history and answer together, at most; by default 2,048, or what the model allows.
      sampling: how to choose tokens; by default greedy.
      eos_token_id: id or ids that end an answer; the id itself is yielded. None is the model's own end tokens, () is never.
      page_size: tokens a page holds.
      prefill_chunk: tokens of the history that are computed in one step, at most.
      cache_dtype: of keys and values, by default the model's.
      deterministic: an answer's bits then do not depend on what the cache held.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.

    Attributes:
      held: token ids in the cache.
      reused: tokens of the last history that the cache held already.
      steps: passes through the model that the last answer has taken so far, those of its prompt included.
      finished: whether the last answer ended by an end token.
      nonfinite: tokens so far whose logits were not finite.

    Raises:
      ValueError: an argument is out of range; the message names it and the way out.

    Examples:
      conversation = jaxkv.Conversation(model)
      for token in conversation.answer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)):
          print(tokenizer.decode([token.token]), end="")
    """

    def __init__(
        self, model: Decoder, *, max_seq_len: int | None = None, sampling: Sampling | None = None, eos_token_id: Ends = None,
        page_size: int = 16, prefill_chunk: int = PREFILL_CHUNK, cache_dtype: str | None = None, deterministic: bool = False,
        implementation: str | None = None,
    ):  # fmt: skip
        check_decoder(model)
        allowed = model.config.max_seq_len
        room = min(CONTEXT, allowed) if max_seq_len is None else integer("max_seq_len", max_seq_len, 2)
        if room > allowed:
            raise ValueError(f"max_seq_len is {room}, but the model allows {allowed} tokens")
        sampling, page_size = as_sampling(sampling), integer("page_size", page_size)
        chunk = Chunk.holding(integer("prefill_chunk", prefill_chunk), room, 1)
        self.model = model
        self.max_seq_len = room
        self.held: list[int] = []
        self.reused = self.steps = self.nonfinite = 0
        self.finished = False
        self._sizes = CacheConfig(pages_for(room, page_size) + 1, page_size, 1, room, cache_dtype)
        self._plan = Plan(room, chunk, not sampling.always_greedy, numerics_of(implementation, deterministic))
        self._sampling, self._eos = sampling.per_row(1), end_tokens(model.config, eos_token_id)
        self._cache: PagedKVCache | None = None
        self._answers = 0

    def __repr__(self) -> str:
        return f"Conversation({len(self.held)} tokens held of up to {self.max_seq_len})"

    @property
    def cache(self) -> PagedKVCache | None:
        """The cache, of one row; the next answer takes its memory over. None before the first answer."""
        return self._cache

    def answer(self, tokens: Any, *, max_new_tokens: int | None = None, key: Any = None) -> Generator[Token, None, None]:
        """The answer to a history, token by token.

        Whoever stops early (`break`, an exception, Ctrl-C) has lost nothing: what was computed stays in the cache.

        Args:
          tokens: ids of the whole history, at least one, [tokens]: a list, or an array of NumPy's or JAX's.
          max_new_tokens: tokens of the answer, at most; by default as many as there is room for.
          key: `jax.random.key`, needed unless the sampling is greedy. One key for all answers draws the same at the same position.

        Returns:
          A generator of `Token`, an end token included; `position` counts from the history's first token.

        Raises:
          ValueError: `tokens` are no ids of the vocabulary or leave no room for an answer, or an argument is out of range; before
            anything is computed. A later `answer` ends an earlier one, whose iterator then raises.
        """
        if isinstance(tokens, str | bytes | Mapping) or hasattr(tokens, "input_ids"):
            raise ValueError(f"{_NAMES.tokens} must be one history's ids, got {shown(tokens)}: {_WAY_OUT}")
        if getattr(tokens, "ndim", 1) != 1 or (
            isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], list | tuple)
        ):
            raise ValueError(
                f"{_NAMES.tokens} are one history, a flat list of ids, got {shown(tokens)}: give its row, tokens[0]"
            )
        ids = np.asarray(read_rectangle([tokens], _NAMES))  # stays NumPy's: jax compiles a program for each shape it takes over
        check_tokens(ids, None, self.model.config.vocab_size, _NAMES.tokens)
        length, room = ids.shape[1], self.max_seq_len
        if length >= room:
            raise ValueError(
                f"the history has {length} tokens and leaves no room for an answer in {room}: drop the oldest turns, or give "
                f"a larger max_seq_len (the model allows {self.model.config.max_seq_len})"
            )
        limit = room - length if max_new_tokens is None else integer("max_new_tokens", max_new_tokens)
        if limit > room - length:
            raise ValueError(f"a history of {length} tokens and {limit} new ones are more than max_seq_len, {room}")
        prompt = np.zeros((1, room), np.int32)
        prompt[:, :length] = ids
        job = Job(
            prompts=as_int32(prompt),
            prompt_lengths=as_int32(np.array([length])),
            limits=as_int32(np.array([limit])),
            keys=read_keys(key, 1, greedy=not self._plan.sampled),
            sampling=self._sampling,
            eos=self._eos,
            num_real=as_int32(np.asarray(1)),
        )
        return self._answer(prompt[0, :length].tolist(), job, limit)

    def _answer(self, history: list[int], job: Job, limit: int) -> Generator[Token, None, None]:
        self._answers += 1
        mine = self._answers
        announced = f"a conversation of up to {self.max_seq_len:,} tokens"
        cache, self._cache = self._cache, None
        if cache is None or cache.donated:  # an exception that came in the middle of a step has taken it along
            self.held, cache = [], _new_cache(self.model, self._sizes)
        self.reused = min(common_prefix(self.held, history), len(history) - 1)  # the last token's logits are needed
        self.held, self.finished, self.steps = history[: self.reused], False, 0
        with waiting_on_compiler(announced):
            run = _begin(cache, np.int32(self.reused), self._plan.max_new)
        self._cache = run.cache
        before, seen = self.nonfinite, 0
        while not self.finished and seen < limit:
            if self._answers != mine:
                raise ValueError("this answer was given up when a later one began")
            with waiting_on_compiler(announced):
                run = take_steps(
                    self.model, job, run, self._plan, np.int32(1)
                )  # stops before it would empty a row that is done
            self._cache = run.cache
            results = (run.out_lengths, run.tokens, run.logprobs, run.finished, run.cache.lengths, run.nonfinite)
            counts, made, logprobs, finished, lengths, overflown = map(np.asarray, results)
            self.steps += 1
            self.finished, self.nonfinite = bool(finished[0]), before + int(overflown)
            self.held = [*history, *made[0, : counts[0]].tolist()][: lengths[0]]
            for i in range(seen, int(counts[0])):
                seen = i + 1
                yield Token(0, 0, len(history) + i, int(made[0, i]), float(logprobs[0, i]))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@functools.partial(jax.jit, static_argnames="sizes")
def _new_cache(model: Decoder, sizes: CacheConfig) -> PagedKVCache:
    return PagedKVCache.of_sizes(model.config, sizes, model.mesh)


@functools.partial(jax.jit, static_argnames="max_new", donate_argnames="cache")
def _begin(cache: PagedKVCache, keep: Array, max_new: int) -> Run:
    """The only request in the only row, which holds its first `keep` tokens."""

    def begin(cache: PagedKVCache, keep: Array) -> Run:
        run = start(cache.truncate(keep[None]), 1, max_new)
        return dataclasses.replace(run, row_request=jnp.zeros_like(run.row_request), next=jnp.ones_like(run.next))

    return within(begin, cache, keep)
