"""What a family is: four things that each of its files provides."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.mapping import Tensor


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family of Hugging Face's.

    Attributes:
      model_type: its name in a `config.json`.
      architecture: its causal language model's class in transformers.
      prefix: what every tensor name but the output matrix's begins with; files of the bare model lack it.
      read: a transformers configuration to ours; raises ValueError on a field that is not supported.
      write: ours to the fields of a transformers configuration.
      tensors: the table of all tensors of a model.
      harmless: regular expressions of tensors that files hold beyond those in the table, and that say nothing new.
      lm_head: the output matrix's name; where it is tied, a file may hold it all the same.
      aliases: other names of tensors, as older files have them, to the table's.
      refused: fields of its configuration that are only looked at to refuse them.
    """

    model_type: str
    architecture: str
    prefix: str
    read: Callable[[Any], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig], Iterable[Tensor]]
    harmless: tuple[str, ...] = ()
    lm_head: str = "lm_head.weight"
    aliases: tuple[tuple[str, str], ...] = ()
    refused: frozenset[str] = frozenset()
