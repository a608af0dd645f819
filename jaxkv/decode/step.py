"""One step of the model through the cache, and `extend`, the step by hand.

`step` runs decode rows and a chunk of prompts through the layers together, so that the weights are read once; only attention
tells the two apart. The chunk is cut into pieces, each of them of one row, so that several short prompts fill it together:

    decode_tokens   row 0 | row 1 |  -  |  -  | row 4           one token each
    chunk_tokens    row 2 . . . . | row 2 . . | row 3 . . .     pieces of one width; a row's pieces follow one another

Everything that generates runs through here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import pages_for
from jaxkv.model.attend import Paged, Segment
from jaxkv.model.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """New tokens of one step.

    Attributes:
      decode_tokens: i32[seqs], the next token of each row.
      decode_count: i32[seqs], 1 where the row takes part, else 0; it is 0 for the only row of a batch where there are pieces.
      chunk_tokens: i32[pieces, width], pieces of rows' prompts; there may be none.
      chunk_rows: i32[pieces], the row of each (whose decode_count is 0). Of a row's pieces the earlier stands first.
      chunk_counts: i32[pieces], how many of each piece's first tokens are real; 0 leaves the row it names alone.
    """

    decode_tokens: Int[Array, " seqs"]
    decode_count: Int[Array, " seqs"]
    chunk_tokens: Int[Array, "pieces width"]
    chunk_rows: Int[Array, " pieces"]
    chunk_counts: Int[Array, " pieces"]

    @classmethod
    def decode(cls, tokens: Int[Array, " seqs"], count: Int[Array, " seqs"]) -> "StepInputs":
        """A step of decode rows alone."""
        none = jnp.zeros(0, jnp.int32)
        return cls(tokens, count, none[:, None], none, none)

    def chunk_num_tokens(self) -> Int[Array, " seqs"]:
        """The chunk's tokens per row."""
        return jnp.zeros_like(self.decode_count).at[self.chunk_rows].add(self.chunk_counts, mode="drop")

    def num_tokens(self) -> Int[Array, " seqs"]:
        """New tokens per row."""
        return self.decode_count if self.chunk_rows.shape[0] == 0 else self.decode_count + self.chunk_num_tokens()

    def _later(self) -> Bool[Array, "pieces pieces"]:
        """Which pieces (second axis) come after each (first axis) in the same row, with a token in them."""
        piece = jnp.arange(self.chunk_rows.shape[0])
        same = self.chunk_rows[None, :] == self.chunk_rows[:, None]
        return same & (piece[None, :] > piece[:, None]) & (self.chunk_counts > 0)[None, :]

    def chunk_segment(self, cache: PagedKVCache) -> Segment:
        """Where the chunk attends, given a cache whose lengths count its tokens."""
        rows = self.chunk_rows
        ends = cache.lengths[rows] - jnp.sum(jnp.where(self._later(), self.chunk_counts[None, :], 0), axis=1)
        return Segment(cache.block_tables[rows], ends, self.chunk_counts, queries=self.chunk_tokens.shape[1])

    def with_chunk_ends(
        self, last: Float[Array, "places hidden"], chunk: Float[Array, "chunk hidden"], stride: int = 1
    ) -> Float[Array, "places hidden"]:
        """`last`, with the chunk's last hidden state of each row that it has tokens of at place row * stride."""
        pieces, width = self.chunk_tokens.shape
        ends = (self.chunk_counts > 0) & ~jnp.any(self._later(), axis=1)
        place = jnp.where(ends, self.chunk_rows * stride, last.shape[0])
        end = jnp.arange(pieces) * width + jnp.maximum(self.chunk_counts - 1, 0)
        return last.at[place].set(chunk[end], mode="drop")


def step(
    model: Decoder,
    cache: PagedKVCache,
    inputs: StepInputs,
    *,
    implementation: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "seqs vocab"], PagedKVCache]:
    """Decode rows and a chunk of prompts through the model.

    The pages for the new tokens must have been allocated; a row that could not get them must not take part.

    Args:
      model: the decoder.
      cache: donated.
      inputs: the new tokens.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.
      deterministic: a row's bits do not depend on what else is in the step.

    Returns:
      Logits of each row's last new token (of rows without new tokens: unspecified), and the cache.
    """
    cache = cache.advance(inputs.num_tokens())
    seqs, pieces = inputs.decode_tokens.shape[0], inputs.chunk_rows.shape[0]
    # A batch's only row does not decode beside its own prompt: a third of the program less to compile.
    decodes = not pieces or seqs > 1
    tokens, segments = inputs.chunk_tokens.reshape(-1), []
    if decodes:
        tokens = jnp.concatenate([inputs.decode_tokens, tokens])
        segments.append(Segment(cache.block_tables, cache.lengths, inputs.decode_count, queries=1))
    if pieces:
        segments.append(inputs.chunk_segment(cache))
    attend = Paged.over(tuple(segments), cache.page_size, implementation=implementation, deterministic=deterministic)
    hidden, pages = model.forward(tokens, attend.positions(), attend, cache.pages, deterministic=deterministic)
    assert pages is not None
    last = hidden[:seqs]
    if pieces:
        last = inputs.with_chunk_ends(last, hidden[-inputs.chunk_tokens.size :])
    return model.logits(last, deterministic=deterministic), cache.with_pages(pages)


def check_tokens(tokens: Array, vocab_size: int) -> None:
    """Raise ValueError if a token id, where it is known now, is outside the vocabulary."""
    if isinstance(tokens, Tracer):
        return
    wrong = np.asarray(tokens)[(np.asarray(tokens) < 0) | (np.asarray(tokens) >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary (0 to {vocab_size - 1})")


def extend(
    model: Decoder,
    cache: PagedKVCache,
    tokens: Int[Array | np.ndarray, "seqs chunk"],
    num_tokens: Int[Array | np.ndarray, " seqs"],
    *,
    all_logits: bool = False,
    implementation: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "seqs *chunk vocab"], PagedKVCache]:
    """Append tokens to every row of the cache: allocates pages, writes keys and values, attends.

    Prefill, a later chunk of it, and decode (chunk = 1) are this one call.

    Args:
      model: the decoder.
      cache: donated when called outside jit: use the returned one.
      tokens: token ids, each row's real ones first.
      num_tokens: how many of each row's tokens are real, 0 to chunk; 0 leaves a row as it is.
      all_logits: return logits of all positions instead of each row's last.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.
      deterministic: a row's bits do not depend on its batch mates, nor on how its tokens are cut into chunks.

    Returns:
      float32 logits, `[seqs, vocab]` of each row's last new token, or `[seqs, chunk, vocab]`; zeros where there is no new
      token. And the cache. Inside jit a row that gets no pages takes none of its tokens, and `cache.out_of_pages` says so.

    Raises:
      ValueError: (outside jit) a token id or a count is out of range, a row would outgrow its table or the model, or the pool
        has too few free pages; nothing has happened then, and the cache given is still good.
    """
    tokens, num_tokens = jnp.asarray(tokens), jnp.asarray(num_tokens)
    if tokens.ndim != 2 or tokens.shape[0] != cache.max_seqs or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [seqs, chunk] with seqs = {cache.max_seqs} and chunk > 0, got shape {tokens.shape}")
    if num_tokens.shape != (cache.max_seqs,):
        raise ValueError(f"num_tokens must be [seqs] = [{cache.max_seqs}], got shape {num_tokens.shape}")
    static = (all_logits, implementation, deterministic)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((model, cache, tokens, num_tokens))):
        return _extend(model, cache, tokens, num_tokens, *static)
    check_tokens(jnp.where(jnp.arange(tokens.shape[1])[None] < num_tokens[:, None], tokens, 0), model.config.vocab_size)
    _check_room(cache, np.asarray(num_tokens), tokens.shape[1], model.config.max_seq_len)
    return _extend_jit(model, cache, tokens, num_tokens, *static)


def _check_room(cache: PagedKVCache, num_tokens: np.ndarray, chunk: int, allowed: int) -> None:
    wrong = np.flatnonzero((num_tokens < 0) | (num_tokens > chunk))
    if wrong.size:
        raise ValueError(f"num_tokens[{wrong[0]}] is {num_tokens[wrong[0]]}, but must be 0 to {chunk}")
    room = cache.pages_per_seq * cache.page_size
    lengths, most = np.asarray(cache.lengths), min(room, allowed)
    long = np.flatnonzero((num_tokens > 0) & (lengths + num_tokens > most))
    if long.size:
        row = long[0]
        raise ValueError(
            f"row {row} holds {lengths[row]} tokens and cannot take {num_tokens[row]} more: "
            f"its block table has room for {room} and the model allows {allowed}"
        )
    stuck = np.flatnonzero((num_tokens > 0) & np.asarray(cache.out_of_pages))
    if stuck.size:
        raise ValueError(f"rows {stuck.tolist()} ran out of pages earlier and have a gap: free them before extending them")
    need = int(np.asarray(cache.pages_needed(jnp.asarray(num_tokens, jnp.int32))).sum())
    if need > int(cache.num_free):
        raise ValueError(
            f"out of pages: the new tokens need {need} pages and {int(cache.num_free)} of {cache.num_pages - 1} are free; free rows, "
            f"or create the cache with num_pages >= {cache.num_pages + need - int(cache.num_free)}"
        )


def _extend(
    model: Decoder,
    cache: PagedKVCache,
    tokens: Array,
    num_tokens: Array,
    all_logits: bool,
    implementation: str | None,
    deterministic: bool,
) -> tuple[Array, PagedKVCache]:
    seqs, chunk = tokens.shape
    num_tokens = num_tokens.astype(jnp.int32)
    cache = cache.allocate(num_tokens, max_tokens=chunk)
    count = jnp.where(cache.out_of_pages, 0, num_tokens)
    cache = cache.advance(count)
    segment = Segment(cache.block_tables, cache.lengths, count, queries=chunk)
    attend = Paged.over((segment,), cache.page_size, implementation=implementation, deterministic=deterministic)
    flat = tokens.astype(jnp.int32).reshape(-1)
    hidden, pages = model.forward(flat, attend.positions(), attend, cache.pages, deterministic=deterministic)
    assert pages is not None
    if all_logits:
        logits = model.logits(hidden, deterministic=deterministic).reshape(seqs, chunk, -1)
        real = jnp.arange(chunk)[None, :] < count[:, None]
    else:
        last = hidden.reshape(seqs, chunk, -1)[jnp.arange(seqs), jnp.maximum(count - 1, 0)]
        logits, real = model.logits(last, deterministic=deterministic), count > 0
    return jnp.where(real[..., None], logits, 0.0), cache.with_pages(pages)


_extend_jit = functools.partial(jax.jit, static_argnums=(4, 5, 6), donate_argnums=(1,))(_extend)


def check_pool(num_pages: int, page_size: int, longest: int, what: str) -> None:
    """Raise ValueError if a pool cannot hold one sequence of `longest` tokens."""
    if page_size < 1:
        raise ValueError(f"page_size must be an integer >= 1, got {page_size}")
    need = pages_for(longest, page_size) + 1
    if num_pages < need:
        raise ValueError(
            f"num_pages is {num_pages}, but one sequence of {longest} tokens ({what}) needs {need} pages of {page_size} tokens, the "
            "null page included"
        )
