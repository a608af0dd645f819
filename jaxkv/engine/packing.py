"""Everything that a step is told, in one array of 32-bit integers: one transfer from the host, and names on both sides.

The sizes are those of the program that the step runs (`Shape`), so several steps share a program; what is not used keeps the values that
`empty` puts there.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a program that runs a step; static under jit.

    Attributes:
      rows: sequences.
      pages_per_seq: width of the block tables.
      pieces, width: of prompts; no pieces are a step of decode rows alone.
      sampled: whether a row may draw by chance.
      banned: tokens that a row may be kept from.
      alternatives: most probable tokens whose log-probabilities are given back for each row.
      prompt_alternatives: the same for each token of the pieces; -1 where nothing is given back for them.
    """

    rows: int
    pages_per_seq: int
    pieces: int = 0
    width: int = 1
    sampled: bool = False
    banned: int = 0
    alternatives: int = 0
    prompt_alternatives: int = -1

    def serves(self, other: "Shape") -> bool:
        """Whether this program can run a step of another one's sizes."""
        sizes = ("rows", "pieces", "sampled", "banned", "alternatives", "prompt_alternatives")
        return self.pages_per_seq == other.pages_per_seq and all(getattr(self, s) >= getattr(other, s) for s in sizes)

    def fields(self) -> dict[str, tuple[tuple[int, ...], Any, int | float]]:
        """Name to shape, dtype and value where nothing is said of every part."""
        rows, pieces = (self.rows,), (self.pieces,)
        parts: dict[str, tuple[tuple[int, ...], Any, int | float]] = {
            "tables": ((self.rows, self.pages_per_seq), np.int32, 0),  # the null page
            "lengths": (rows, np.int32, 0),  # tokens valid after the step
            "places": (rows, np.int32, 2**30),  # where a row's last token is kept on the device; outside of it: nowhere
            "tokens": (rows, np.int32, -1),  # -1 is the row's last token
            "decodes": (rows, np.int32, 0),
            "draws": (rows, np.int32, 0),
        }
        if self.pieces:
            parts["piece_tokens"] = ((self.pieces, self.width), np.int32, 0)
            parts["piece_rows"] = (pieces, np.int32, 0)
            parts["piece_counts"] = (pieces, np.int32, 0)
        if self.sampled:
            parts |= {"seed": (rows, np.uint32, 0), "fold": (rows, np.int32, -1), "nth": (rows, np.int32, 0)}
            parts |= {"temperature": (rows, np.float32, 0.0), "top_k": (rows, np.int32, 0)}
            parts |= {"top_p": (rows, np.float32, 1.0), "min_p": (rows, np.float32, 0.0)}
        if self.banned:
            parts["banned"] = ((self.rows, self.banned), np.int32, 2**30)  # no token
        if self.prompt_alternatives >= 0:
            parts["targets"] = ((self.pieces, self.width), np.int32, 0)
        return parts

    def empty(self) -> tuple[Int[np.ndarray, " words"], dict[str, np.ndarray]]:
        """The array of a step in which nothing happens, and its parts by name, which share its memory."""
        fields = self.fields()
        words = np.empty(sum(math.prod(shape) for shape, _, _ in fields.values()), np.int32)
        parts, begin = {}, 0
        for name, (shape, dtype, nothing) in fields.items():
            end = begin + math.prod(shape)
            parts[name] = words[begin:end].view(dtype).reshape(shape)
            parts[name][...] = nothing
            begin = end
        return words, parts

    def unpack(self, words: Int[Array, " words"]) -> dict[str, Array]:
        """The parts of a step's array on the device."""
        parts, begin = {}, 0
        for name, (shape, dtype, _) in self.fields().items():
            end = begin + math.prod(shape)
            part = words[begin:end].reshape(shape)
            parts[name] = part if dtype == np.int32 else lax.bitcast_convert_type(part, jnp.dtype(dtype))
            begin = end
        return parts


class Drawn(NamedTuple):
    """What a step gives back for each row, or for each token of its pieces.

    Attributes:
      token: i32[rows], the token that was drawn, or the one that was asked about.
      logprob: f32[rows], under the model's own distribution.
      rank: i32[rows], 1 for the most probable token; 0 where no alternatives were asked for.
      ids, logprobs: [rows, alternatives], the most probable tokens.
    """

    token: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


def packed(token: Array, logprob: Array, rank: Array, ids: Array, logprobs: Array) -> Int[Array, "rows words"]:
    """The fields of a `Drawn` as one array, so that one transfer brings them to the host."""
    bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return jnp.concatenate([token[:, None], bits(logprob)[:, None], rank[:, None], ids, bits(logprobs)], axis=1)


def unpacked(words: Int[np.ndarray, "rows words"]) -> Drawn:
    """The inverse of `packed`, on the host."""
    k = (words.shape[1] - 3) // 2
    floats = words.view(np.float32)
    return Drawn(words[:, 0], floats[:, 1], words[:, 2], words[:, 3 : 3 + k], floats[:, 3 + k :])
