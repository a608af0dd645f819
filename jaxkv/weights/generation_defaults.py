"""`generation_config.json`: how a model's makers want it to be sampled, for those who say nothing themselves.

`jaxkv.generate` does not read it: its arguments say all there is to say. The names of transformers (`jaxkv.hf`) and the command line
do, as transformers does. The file's token ids are a part of the `ModelConfig` (see `jaxkv.weights.loading`) and not repeated here.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv.weights.safetensors_file import read_json

FILE = "generation_config.json"

UNSUPPORTED: dict[str, tuple] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "stop_strings": (),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "diversity_penalty": (0,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "bad_words_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "token_healing": (),
    "watermarking_config": (),
    "prompt_lookup_num_tokens": (),
}
"""Fields of transformers' that change tokens and have no counterpart yet, and the values besides null, false and empty that do not."""


class GenerationWarning(UserWarning):
    """A `generation_config.json` asks for something that jaxkv does not have: the tokens are chosen without it."""


def _number(least: int | float, most: int | float = math.inf, *, above: bool = False) -> tuple[Any, str]:
    def fits(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and least <= x <= most and not (above and x == least)

    upper = "" if most == math.inf else f" and <= {most:g}"
    return fits, f"a number {'>' if above else '>='} {least:g}{upper}"


def _count(least: int) -> tuple[Any, str]:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= least, f"an integer >= {least}"


_RULES: dict[str, tuple[Any, str]] = {
    "do_sample": (lambda x: isinstance(x, bool), "true or false"),
    "temperature": _number(0),
    "top_k": _count(0),
    "top_p": _number(0, 1, above=True),
    "min_p": _number(0, 1),
    "max_length": _count(1),
    "max_new_tokens": _count(1),
    "num_beams": _count(1),
    "num_return_sequences": _count(1),
    "length_penalty": _number(-math.inf),
    "early_stopping": (lambda x: isinstance(x, bool) or x == "never", 'true, false or "never"'),
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What a `generation_config.json` says, in transformers' names; None where it says nothing.

    Args:
      do_sample: whether to sample; else greedy, or beams.
      temperature, top_k, top_p, min_p: of the sampling.
      max_length, max_new_tokens: prompt and new tokens together; the new ones alone, which counts where both are given.
      num_beams, num_return_sequences, length_penalty, early_stopping: as for `CausalLM.generate`.
      unsupported: (name, value) of what jaxkv has no counterpart for; it is only kept, to be written back.
    """

    do_sample: bool | None = None
    temperature: int | float | None = None
    top_k: int | None = None
    top_p: int | float | None = None
    min_p: int | float | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: int | float | None = None
    early_stopping: bool | str | None = None
    unsupported: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "GenerationDefaults":
        """Those of a `generation_config.json`'s content; what is neither known nor in `UNSUPPORTED` changes no token.

        Raises:
          ValueError: a value is of a wrong kind or out of range; the message names the field.
        """
        for name, (fits, rule) in _RULES.items():
            if (value := fields.get(name)) is not None and not fits(value):
                raise ValueError(f"{name} must be {rule}, got {value!r}")
        others = tuple((name, fields[name]) for name in UNSUPPORTED if not changes_nothing(name, fields.get(name)))
        return cls(**{name: fields.get(name) for name in _RULES}, unsupported=others)

    def fields(self) -> dict[str, Any]:
        """The inverse of `of`."""
        return {name: getattr(self, name) for name in _RULES if getattr(self, name) is not None} | dict(self.unsupported)

    def complaint(self, *further: str) -> str | None:
        """One line that names what the file asks for and does not get, None where there is nothing.

        Args:
          *further: names of supported fields that the caller has no use for, either.
        """
        asked = [*self.unsupported, *((name, getattr(self, name)) for name in further)]
        named = [f"{name}={value!r}" for name, value in asked if value is not None]
        if not named:
            return None
        return f"{FILE} asks for {', '.join(named)}, which is not supported here: tokens are chosen without it"


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a value of a field in `UNSUPPORTED` leaves the tokens as they are."""
    if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and value in UNSUPPORTED[name]


def read_generation_defaults(folder: Path | None) -> GenerationDefaults:
    """Those of a model's folder; without one (a GGUF file), or where the file is missing, nothing is said.

    Raises:
      ValueError: the file is no JSON object, or a field has a wrong value; the message names both.
    """
    if folder is None or not (folder / FILE).is_file():
        return GenerationDefaults()
    try:
        return GenerationDefaults.of(read_json(folder / FILE))
    except ValueError as error:
        raise ValueError(str(error) if str(folder) in str(error) else f"{folder / FILE}: {error}") from error
