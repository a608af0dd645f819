"""The runner: batches of the scheduler in, tokens out. It owns what an engine has on the device: pages, last tokens, and compiled programs.

A step is dispatched and not waited for; its results are read after the next one has been dispatched, so that the host's work hides behind
the device's.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxkv.cache.pages import Pages
from jaxkv.config import CacheConfig, ModelConfig, pages_for
from jaxkv.engine.batch import Batch, Limits
from jaxkv.engine.device_step import StepProgram
from jaxkv.engine.packing import Drawn, Shape, unpacked
from jaxkv.engine.params import MAX_BANNED, MAX_LOGPROBS
from jaxkv.engine.programs import Programs
from jaxkv.engine.sequence import Sequence
from jaxkv.model.decoder import Decoder
from jaxkv.ops.numerics import Numerics

FEW = 4
"""Rows of the smaller of the two programs that decode."""


class Dispatched(NamedTuple):
    """A step that the device is doing, or has done.

    Attributes:
      batch: what it does.
      rows, pieces: its results on the device.
      width: tokens of a piece.
    """

    batch: Batch
    rows: Array
    pieces: Array
    width: int


class Runner:
    """Runs batches.

    Args:
      model: the decoder; its arrays are used as they are.
      sizes: of the pool of pages and of sequences.
      limits: sizes of the scheduler's batches.
      numerics: how the model is computed.

    Attributes:
      programs: compiled programs.
      sizes: as given.
    """

    def __init__(self, model: Decoder, sizes: CacheConfig, limits: Limits, numerics: Numerics):
        self.sizes, self._limits = sizes, limits
        self._config, self._mesh = model.config, model.mesh
        self._leaves, self._structure = jax.tree.flatten(model)
        self._pages: tuple[Pages, ...] | None = None
        self._last: Array | None = None
        self.make_pages()
        avals = jax.tree.map(_aval, (tuple(self._leaves), self._pages, self._last))
        self.programs = Programs(functools.partial(_compile, self._structure, sizes.page_size, numerics, avals))

    @property
    def has_pages(self) -> bool:
        """Whether the pages are there: neither freed, nor lost by a step that failed."""
        return self._pages is not None and not any(x.is_deleted() for x in jax.tree.leaves((self._pages, self._last)))

    def make_pages(self) -> None:
        """Take memory for pages, whose contents are nothing to begin with."""
        self._pages = _empty_pages(self._config, self.sizes, self._mesh)
        self._last = jnp.zeros(self._limits.rows, jnp.int32)

    def free_pages(self) -> None:
        """Give the pages' memory back at once."""
        for x in jax.tree.leaves((self._pages, self._last)):
            x.delete()
        self._pages = self._last = None

    def replace_weights(self, leaves: List[Array]) -> None:
        """Compute with these arrays from the next step on."""
        self._leaves = list(leaves)

    @property
    def leaves(self) -> List[Array]:
        """The arrays of the model."""
        return self._leaves

    @property
    def structure(self) -> Any:
        """How the arrays make up a decoder."""
        return self._structure

    def shapes(self, *, sampled: bool) -> list[Shape]:
        """The programs that ordinary steps need, the one that serves for all of them first."""
        rows, per_seq = self._limits.rows, pages_for(self.sizes.max_seq_len, self.sizes.page_size)
        chunk = Shape(rows, per_seq, self._limits.pieces, self._limits.width, sampled)
        return [chunk, *(Shape(n, per_seq, sampled=sampled) for n in dict.fromkeys((min(FEW, rows), rows)))]

    def dispatch(self, batch: Batch) -> Dispatched:
        """Begin a step.

        Raises:
          Exception: whatever compiling or running raises; `has_pages` says whether the pages are lost then.
        """
        shape, program = self.programs.get(self._shape_of(batch))
        words, parts = shape.empty()
        _fill(parts, shape, batch)
        rows, pieces, self._last, self._pages = program(self._leaves, self._pages, self._last, words)
        return Dispatched(batch, rows, pieces, shape.width)

    def read(self, step: Dispatched) -> tuple[Drawn, Drawn | None]:
        """Wait for a step: what it has drawn for each of the batch's sequences, and what it says of each token of its pieces, or None."""
        pieces = unpacked(np.asarray(step.pieces)) if step.pieces.shape[0] else None
        return unpacked(np.asarray(step.rows)), pieces

    def _shape_of(self, batch: Batch) -> Shape:
        """The rung of the ladder that a batch needs."""
        small, *others = self.shapes(sampled=any(not s.request.params.greedy for s in batch.drawing))[1:]
        decode = small if len(batch.sequences) <= small.rows or not others else others[0]
        base = self.shapes(sampled=decode.sampled)[0] if batch.pieces else decode
        wanted = [s.request.params for s in batch.drawing]
        return Shape(
            base.rows,
            base.pages_per_seq,
            base.pieces,
            base.width,
            base.sampled,
            banned=MAX_BANNED if any(_banned(s) for s in batch.drawing) else 0,
            alternatives=MAX_LOGPROBS if any(p.logprobs is not None for p in wanted) else 0,
            prompt_alternatives=_prompt_alternatives(batch),
        )


@functools.lru_cache(maxsize=32)  # for whoever makes an engine again, such as a notebook's cell
def _compiled(program: StepProgram, avals: tuple) -> Callable:
    leaves, pages, last = avals
    words, _ = program.shape.empty()
    return jax.jit(program.__call__, donate_argnums=(1, 2)).lower(list(leaves), pages, last, words).compile()


def _compile(structure: Any, page_size: int, numerics: Numerics, avals: tuple, shape: Shape) -> Callable:
    return _compiled(StepProgram(shape, page_size, numerics, structure), avals)


def _aval(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_pages(config: ModelConfig, sizes: CacheConfig, mesh: Mesh | None) -> tuple[Pages, ...]:
    return tuple(Pages.create(config, sizes, mesh) for _ in range(config.num_layers))


def _banned(sequence: Sequence) -> frozenset[int]:
    """Tokens that a sequence may not draw yet."""
    params = sequence.request.params
    early = (
        len(sequence.output) + sequence.in_flight - 1 < params.min_tokens
    )  # the token to be drawn is counted in flight already
    return sequence.request.ends | frozenset(params.stop_token_ids or ()) if early else frozenset()


def _prompt_alternatives(batch: Batch) -> int:
    return MAX_LOGPROBS if any(p.sequence.request.whole_prompt and p.sequence.index == 0 for p in batch.pieces) else -1


def _fill(parts: dict[str, np.ndarray], shape: Shape, batch: Batch) -> None:
    """Write a batch into the parts of a step's array."""
    place = {id(sequence): row for row, sequence in enumerate(batch.sequences)}
    drawing = {id(sequence) for sequence in batch.drawing}
    for row, sequence in enumerate(batch.sequences):
        parts["tables"][row, : len(sequence.pages)] = sequence.pages
        parts["lengths"][row] = sequence.computed
        parts["places"][row] = sequence.row
        if id(sequence) in drawing:
            parts["draws"][row] = 1
            _fill_sampling(parts, shape, row, sequence)
    for sequence in batch.decode:
        row = place[id(sequence)]
        parts["decodes"][row] = 1
        position = sequence.computed - 1
        parts["tokens"][row] = sequence.token_at(position) if position < sequence.known else -1
    for i, piece in enumerate(batch.pieces):
        count = piece.end - piece.begin
        parts["piece_tokens"][i, :count] = piece.sequence.tokens(piece.begin, piece.end)
        parts["piece_rows"][i], parts["piece_counts"][i] = place[id(piece.sequence)], count
        if "targets" in parts:
            targets = piece.sequence.tokens(piece.begin + 1, min(piece.end + 1, piece.sequence.known))
            parts["targets"][i, : len(targets)] = targets


def _fill_sampling(parts: dict[str, np.ndarray], shape: Shape, row: int, sequence: Sequence) -> None:
    params = sequence.request.params
    if shape.banned and (banned := _banned(sequence)):
        parts["banned"][row, : len(banned)] = sorted(banned)
    if not shape.sampled or params.greedy:
        return
    for name in ("temperature", "top_k", "top_p", "min_p"):
        parts[name][row] = getattr(params, name)
    seed, fold = sequence.request.seed
    parts["seed"][row], parts["fold"][row], parts["nth"][row] = seed, fold, sequence.index
