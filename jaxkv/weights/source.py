"""What a model is read from: named tensors in some file format, and how that format spells the names of a family's table."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Source(Protocol):
    """Tensors of one model, read one at a time.

    Attributes:
      where: the file or folder, for messages.
      tensors: name in the file -> shape as the family's table has it, and dtype name ("float32", ...).
      harmless: regular expressions of tensors that may be there beyond the table's.
    """

    where: str

    @property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """See above."""
        ...

    @property
    def harmless(self) -> Sequence[str]:
        """See above."""
        ...

    def spellings(self, name: str) -> Sequence[str]:
        """The names a tensor of the table may have in the file, the usual one first."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor by its name in the file, in the shape the table has; the caller owns it."""
        ...
