"""What one call of `CausalLM.generate` asks for: by its caller, else by `generation_config.json`, else by transformers' default."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from jaxkv.config import ModelConfig
from jaxkv.decode.sampling import Sampling
from jaxkv.hf.inputs import Inputs
from jaxkv.hf.values import count, number, seed, token_ids, truth
from jaxkv.weights.generation_defaults import FILE, GenerationDefaults

DEFAULT_NEW_TOKENS = 20
"""transformers' own, where nobody says how many."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A call's arguments, checked.

    Attributes:
      max_new_tokens: at most.
      sampling: greedy, or by temperature and filters.
      key: of the sampling.
      num_beams, num_return_sequences, length_penalty, early_stopping: as for `CausalLM.generate`.
      ends: end tokens; () is none.
      pad: what stands behind a text that ended.
      use_cache: whether to keep keys and values.
    """

    max_new_tokens: int
    sampling: Sampling
    key: Array
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
    ends: tuple[int, ...]
    pad: int
    use_cache: bool

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: GenerationDefaults, config: ModelConfig, inputs: Inputs) -> "Request":
        """Check what was given.

        Raises:
          ValueError: a value is out of range, or two do not go together; the message names the argument.
        """
        said = _Said(given, defaults)
        sample = said.value("do_sample", False, truth)
        early = said.value("early_stopping", False, lambda name, x: x if isinstance(x, str) else truth(name, x))
        ends = config.eos_token_ids if given["eos_token_id"] is None else token_ids("eos_token_id", given["eos_token_id"])
        request = cls(
            max_new_tokens=_new_tokens(said, config, inputs),
            sampling=_sampling(said) if sample else Sampling(),
            key=jax.random.key(seed("seed", given["seed"])),
            num_beams=said.value("num_beams", 1, count),
            num_return_sequences=said.value("num_return_sequences", 1, count),
            length_penalty=said.value("length_penalty", 1.0, number),
            early_stopping=early,
            ends=ends,
            pad=_pad(given["pad_token_id"], config, ends),
            use_cache=True if given["use_cache"] is None else truth("use_cache", given["use_cache"]),
        )
        _check(request, said, sample)
        return request


class _Said:
    """A name's value from the first who says one, and who that was."""

    def __init__(self, given: Mapping[str, Any], defaults: GenerationDefaults):
        self._given, self._defaults = given, defaults

    def by_caller(self, name: str) -> bool:
        return self._given[name] is not None

    def origin(self, name: str) -> str:
        in_file = not self.by_caller(name) and getattr(self._defaults, name) is not None
        return f"{name} (of {FILE})" if in_file else name

    def value(self, name: str, default: Any, convert: Any) -> Any:
        value = self._given[name] if self.by_caller(name) else getattr(self._defaults, name)
        return default if value is None else convert(self.origin(name), value)


def _sampling(said: _Said) -> Sampling:
    temperature = said.value("temperature", 1.0, number)
    if temperature == 0:
        raise ValueError(f"{said.origin('temperature')} must be > 0 with do_sample=True, got 0: do_sample=False is greedy")
    top_k = said.value("top_k", 50, lambda name, x: count(name, x, least=0))
    return Sampling(temperature, top_k, said.value("top_p", 1.0, number), said.value("min_p", 0.0, number))


def _new_tokens(said: _Said, config: ModelConfig, inputs: Inputs) -> int:
    """New tokens at most: of max_new_tokens before max_length, of the caller before the file."""
    longest, width = int(inputs.lengths.max()), inputs.ids.shape[1]
    room = config.max_seq_len - longest
    if room < 1:
        raise ValueError(
            f"input_ids has {longest} tokens in a row, and the model allows {config.max_seq_len}, new ones included"
        )
    file_counts = not said.by_caller("max_length") and not said.by_caller("max_new_tokens")
    if said.by_caller("max_new_tokens") or (file_counts and said.value("max_new_tokens", None, count) is not None):
        name, given = said.origin("max_new_tokens"), said.value("max_new_tokens", None, count)
        new = given
    elif (given := said.value("max_length", None, count)) is not None:
        name, new = said.origin("max_length"), given - width
        if new < 1:
            raise ValueError(f"{name} is {given}, but the prompts have {width} tokens already: raise it, or use max_new_tokens")
    else:
        return min(DEFAULT_NEW_TOKENS, room)
    if new > room and not file_counts:
        raise ValueError(
            f"{name} is {given}, but a prompt of {longest} tokens and {new} new ones are more than the model allows "
            f"({config.max_seq_len})"
        )
    return min(new, room)


def _pad(given: Any, config: ModelConfig, ends: tuple[int, ...]) -> int:
    """Old configurations have -1, which is no token and no tokenizer decodes."""
    if given is not None:
        return count("pad_token_id", given, least=0)
    known = [config.pad_token_id, *ends, *config.eos_token_ids]
    return next((int(token) for token in known if token is not None and token >= 0), 0)


def _check(request: Request, said: _Said, sample: bool) -> None:
    beams, results = said.origin("num_beams"), said.origin("num_return_sequences")
    if request.num_beams > 1 and (sample or not request.use_cache):
        raise ValueError(f"{beams} > 1 goes with do_sample=False and use_cache=True, got {request.num_beams}")
    if request.num_beams > 1 and request.num_return_sequences > request.num_beams:
        raise ValueError(f"{results}={request.num_return_sequences} are more than num_beams={request.num_beams}")
    if request.num_beams == 1 and request.num_return_sequences > 1:
        if not sample:
            raise ValueError(
                f"{results}={request.num_return_sequences} greedy results would all be the same: use do_sample=True, or as many "
                "num_beams"
            )
        if not request.use_cache:
            raise ValueError(f"{results}={request.num_return_sequences} needs use_cache=True")
