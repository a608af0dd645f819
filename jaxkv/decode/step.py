"""One step of the model through the cache.

`step` runs decode rows and a chunk of prompts through the layers together, so that the weights are read once; only attention treats
them differently. The chunk is cut into pieces, each of them of one row, so that several short prompts fill it together:

    decode_tokens   row 0 | row 1 |  -  |  -  | row 4           one token each
    chunk_tokens    row 2 . . . . | row 2 . . | row 3 . . .     pieces of one width; a row's pieces follow one another

`generate`, `stream`, speculation and beam search all run through here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.pages import Pages
from jaxkv.cache.tables import Tables
from jaxkv.model.decoder import Decoder
from jaxkv.model.segments import Segment
from jaxkv.ops.numerics import Numerics
from jaxkv.sharding import by_rows, like, within


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """New tokens of one step.

    Attributes:
      decode_tokens: i32[seqs], the next token of each row; i32[seqs, queries] where several are tried at once (speculation); i32[0] in
        a step in which no row decodes, which then costs nothing for it.
      decode_count: i32[seqs], how many of its decode tokens each row takes: 0 or 1, or up to `queries`.
      chunk_tokens: i32[pieces, width], pieces of rows' prompts; there may be none.
      chunk_rows: i32[pieces], the row of each (whose decode_count is 0). Of a row's pieces the earlier stands first.
      chunk_counts: i32[pieces], how many of each piece's first tokens are real; 0 leaves the row it names alone.
    """

    decode_tokens: Int[Array, "decoding *queries"]
    decode_count: Int[Array, " seqs"]
    chunk_tokens: Int[Array, "pieces width"]
    chunk_rows: Int[Array, " pieces"]
    chunk_counts: Int[Array, " pieces"]

    @classmethod
    def decode(cls, tokens: Int[Array, " seqs"], count: Int[Array, " seqs"]) -> "StepInputs":
        """A step of decode rows alone."""
        none = jnp.zeros(0, jnp.int32)
        return cls(tokens, count, none[:, None], none, none)

    def without_chunk(self) -> "StepInputs":
        """The decode rows alone."""
        return StepInputs.decode(self.decode_tokens, self.decode_count)

    def beside_chunk(self) -> "StepInputs":
        """The same, of a step with a chunk: an only row has no decode token beside its own prompt, a third less to compile."""
        if self.decode_count.shape[0] > 1:
            return self
        return dataclasses.replace(self, decode_tokens=self.decode_tokens[:0])

    @property
    def queries(self) -> int:
        """Decode tokens of each row, taken or not."""
        return self.decode_tokens.shape[1] if self.decode_tokens.ndim == 2 else 1

    def chunk_num_tokens(self) -> Int[Array, " seqs"]:
        """The chunk's tokens per row."""
        return jnp.zeros_like(self.decode_count).at[self.chunk_rows].add(self.chunk_counts, mode="drop")

    def num_tokens(self) -> Int[Array, " seqs"]:
        """New tokens per row."""
        if self.decode_tokens.shape[0] == 0:
            return self.chunk_num_tokens()
        return self.decode_count if self.chunk_rows.shape[0] == 0 else self.decode_count + self.chunk_num_tokens()

    def _later(self) -> Bool[Array, "pieces pieces"]:
        """Which pieces (second axis) come after each (first axis) in the same row, with a token in them."""
        piece = jnp.arange(self.chunk_rows.shape[0], dtype=jnp.int32)
        same = self.chunk_rows[None, :] == self.chunk_rows[:, None]
        return same & (piece[None, :] > piece[:, None]) & (self.chunk_counts > 0)[None, :]

    def chunk_segment(self, lengths: Int[Array, " seqs"]) -> Segment:
        """Where the chunk attends, given rows' lengths that count its tokens."""
        behind = jnp.sum(jnp.where(self._later(), self.chunk_counts[None, :], 0), axis=1, dtype=jnp.int32)
        ends = lengths[self.chunk_rows] - behind
        return Segment(self.chunk_rows, ends, self.chunk_counts, queries=self.chunk_tokens.shape[1])

    def segments(self, lengths: Int[Array, " seqs"]) -> tuple[Segment, ...]:
        """What stands where in `tokens()`, given rows' lengths that count the step's tokens."""
        parts = []
        if self.decode_tokens.shape[0]:
            parts.append(Segment(None, lengths, self.decode_count, queries=self.queries))
        if self.chunk_rows.shape[0]:
            parts.append(self.chunk_segment(lengths))
        return tuple(parts)

    def tokens(self) -> Int[Array, " tokens"]:
        """All tokens of the step: those of the decode rows, then the chunk."""
        if self.chunk_rows.shape[0] == 0:
            return self.decode_tokens.reshape(-1)
        return jnp.concatenate([self.decode_tokens.reshape(-1), self.chunk_tokens.reshape(-1)])

    def last_of_each(self, hidden: Float[Array, "tokens hidden"]) -> Float[Array, "places hidden"]:
        """Hidden states of the decode rows' tokens, i.e. place row * queries + query; of a row that the chunk has tokens of, the last
        of these at place row * queries."""
        places, decoding = self.decode_count.shape[0] * self.queries, self.decode_tokens.size
        last = hidden[:places] if decoding else jnp.zeros((places, hidden.shape[1]), hidden.dtype)
        pieces, width = self.chunk_tokens.shape
        if pieces == 0:
            return last
        ends = (self.chunk_counts > 0) & ~jnp.any(self._later(), axis=1)
        place = jnp.where(ends, self.chunk_rows * self.queries, places)
        end = decoding + jnp.arange(pieces, dtype=jnp.int32) * width + jnp.maximum(self.chunk_counts - 1, 0)
        return last.at[place].set(hidden[end], mode="drop")


def step(
    model: Decoder,
    cache: PagedKVCache,
    inputs: StepInputs,
    *,
    implementation: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "places vocab"], PagedKVCache]:
    """Decode rows and a chunk of prompts through the model.

    The pages for the new tokens must have been allocated; a row that could not get them must not take part.

    Args:
      model: the decoder.
      cache: donated.
      inputs: the new tokens.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.
      deterministic: a row's bits do not depend on what else is in the step.

    Returns:
      Logits of each row's last new token, f32[seqs, vocab] (of rows without new tokens: unspecified), and the cache. With several
      decode tokens a row, f32[seqs * queries, vocab]: of each of them.
    """
    numerics = Numerics(implementation, deterministic)

    def run(inputs: StepInputs, model: Decoder, cache: PagedKVCache) -> tuple[Array, PagedKVCache]:
        cache = cache.advance(inputs.num_tokens())
        logits, pages = step_logits(model, inputs, cache.tables, cache.pages, numerics)
        return logits, cache.with_pages(pages)

    logits, new = within(run, inputs, model, cache)
    return by_rows(logits, inputs.decode_count, inputs, model, cache), jax.tree.map(like, new, cache)


def step_logits(
    model: Decoder, inputs: StepInputs, tables: Tables, pages: tuple[Pages, ...], numerics: Numerics
) -> tuple[Float[Array, "places vocab"], tuple[Pages, ...]]:
    """`step` for those who keep tables themselves: these count the step's tokens already, and name their pages."""
    hidden, pages = model.forward_paged(inputs.tokens(), inputs.segments(tables.lengths), tables, pages, numerics)
    return model.logits(inputs.last_of_each(hidden), numerics), pages
