"""What a step does, and the sizes that it stays within.

Host only: no jax.
"""

import dataclasses

from jaxkv.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that the scheduler works within.

    Attributes:
      rows: sequences in a step, at most.
      page_size: tokens of a page.
      pieces, width: room for prompts in a step: so many pieces, each for `width` tokens of one sequence.
      padding_costs: whether the empty part of a chunk costs as much as a full one; else a step's cost follows its real tokens.
      max_model_len: tokens of a sequence, at most.
      prefix_caching: whether pages are kept for later requests.
    """

    rows: int
    page_size: int
    pieces: int
    width: int
    padding_costs: bool
    max_model_len: int
    prefix_caching: bool


@dataclasses.dataclass
class Piece:
    """Tokens of one sequence's prompt in a step: those from position `begin` to before `end`."""

    sequence: Sequence
    begin: int
    end: int


@dataclasses.dataclass
class Batch:
    """What a step does.

    Attributes:
      sequences: that take part, each once.
      decode: the sequences among them that decode.
      pieces: pieces of prompts; those of a sequence follow one another.
      drawing: the sequences that draw a token.
      number: how many steps came before.
    """

    sequences: list[Sequence]
    decode: list[Sequence]
    pieces: list[Piece]
    drawing: list[Sequence]
    number: int
