"""Model families: Hugging Face's configurations and tensor names mapped onto ours, one small file each.

It knows transformers' `config.json` of each family, in all its spellings, and which tensor of a checkpoint is which part of which
parameter. It knows neither files nor arrays (see `jaxkv.weights`), and no mathematics (see `jaxkv.model`).
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families import gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, opt, phi3, qwen2, qwen3
from jaxkv.families.checking import checked
from jaxkv.families.family import Family
from jaxkv.families.hf import quiet
from jaxkv.families.mapping import Part, Tensor
from jaxkv.families.reading import REFUSED

__all__ = ["FAMILIES", "Family", "Part", "Tensor", "family_of", "from_hf", "to_hf"]

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (opt, gpt2, gpt_neox, llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3)
}


def family_of(model_type: Any) -> Family:
    """The family of that name.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"unknown model_type {model_type!r}; the supported families are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _hf_config(fields: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    kind = fields["model_type"]
    try:
        known = copy.deepcopy(checked(fields, REFUSED | FAMILIES[kind].refused))  # transformers writes into what it is given
        with quiet() as transformers:
            return transformers.CONFIG_MAPPING[kind].from_dict(known)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"not a valid {kind} configuration: {' '.join(str(error).split())}") from error


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Turn the content of a `config.json`, of this or an older transformers, into a `ModelConfig`.

    What is missing has transformers' default, and so has null where null is no value of the field. The dtype is not read: it is
    the weights' own.

    Raises:
      ValueError: one line: the family is unknown, a field is missing or invalid, or one changes the mathematics in a way that is
        not supported; it names the field with its value.
    """
    family = family_of(fields.get("model_type"))
    return family.read(_hf_config(fields))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Turn a `ModelConfig` into the content of a `config.json`.

    Raises:
      ValueError: the family is unknown, or cannot express the model; the message names the fields that would be lost.
    """
    family = family_of(config.family)
    fields = {"model_type": family.model_type, "architectures": [family.architecture], **family.write(config)}
    back = dataclasses.replace(from_hf(fields), dtype=config.dtype)
    lost = [f.name for f in dataclasses.fields(config) if getattr(back, f.name) != getattr(config, f.name)]
    if lost:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in lost)
        raise ValueError(f"a {config.family} configuration cannot express {values}")
    return {**fields, "dtype": config.dtype}
