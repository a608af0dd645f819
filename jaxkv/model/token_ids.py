"""Token ids and counts as users bring them: lists, NumPy, JAX or CPU torch, in any integer type; checked once, in front of everything.

    read_tokens     ids and how many of each row are real, as i32[rows, width] and i32[rows]
    read_counts     one count for each row, as i32[rows]

Every entry point of jaxkv reads its ids here. All checks look at what is known now, in the type it came in: ids that int32 cannot hold
are refused before they could become other ids. Values that jax is tracing pass.
"""

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxkv.config import integer, shown

if TYPE_CHECKING:
    ArrayLike = Array
else:
    ArrayLike = Array | np.ndarray
"""What was read: NumPy's array where its values are known, and jax compiles nothing to take it over; to be used as a `jax.Array` only where
something is traced or compiled."""

IDS = 2**31
"""More ids than any vocabulary has; what int32 can hold."""


class Names(NamedTuple):
    """What a caller calls them, for messages."""

    tokens: str = "prompts"
    lengths: str = "prompt_lengths"
    row: str = "prompt"


PROMPTS, ROWS = Names(), Names("tokens", "lengths", "row")


def read_tokens(
    given: Any, lengths: Any = None, *, vocab_size: int = IDS, names: Names = PROMPTS
) -> tuple[Int[ArrayLike, "rows width"], Int[ArrayLike, " rows"]]:
    """Token ids and lengths; lists of different lengths are padded on the right with 0.

    Args:
      given: an array of integers [rows, width], or a list of rows.
      lengths: how many of each row's ids are real; None is all of them. Rows of different lengths have lengths of their own.
      vocab_size: real ids, where they are known, must be below it; what stands in the padding does not matter.
      names: what the caller calls them.

    Raises:
      ValueError: they are something else; the message shows it and names the way out.
    """
    tokens, own = _as_array(given, names)
    if own is not None and lengths is not None:
        raise ValueError(f"{names.lengths} goes with an array of {names.tokens}; lists have lengths of their own")
    counts = read_counts(names.lengths, own if lengths is None else lengths, tokens.shape[0], 1, tokens.shape[1])
    check_tokens(tokens, counts, vocab_size, names.tokens)
    return as_int32(tokens), counts if counts is not None else as_int32(np.full(tokens.shape[0], tokens.shape[1]))


def read_rectangle(given: Any, names: Names = ROWS) -> Array | np.ndarray:
    """Ids [rows, width] in the type they came in, not compared with a vocabulary yet; rows must be of one length.

    Raises:
      ValueError: as `read_tokens`, or rows differ in length.
    """
    tokens, own = _as_array(given, names)
    if own is not None and len(set(own.tolist())) > 1:
        lengths = shown(own.tolist())
        raise ValueError(f"{names.tokens} has rows of {lengths} ids: pad them on the right to one length, with any id")
    return tokens


def as_int32(values: Array | np.ndarray) -> Int[ArrayLike, "..."]:
    """Checked values as int32: as NumPy's where they are known and on one device, since jax would compile a cast for every shape."""
    if isinstance(values, Tracer) or (isinstance(values, jax.Array) and len(values.devices()) > 1):
        return values.astype(jnp.int32)
    return cast(Array, np.asarray(values).astype(np.int32))


def _as_array(given: Any, names: Names) -> tuple[Array | np.ndarray, np.ndarray | None]:
    """Ids [rows, width] in the type they came in; and lengths, if they came as lists."""
    if isinstance(given, str | bytes):
        raise ValueError(f'{names.tokens} is a text, {shown(given)}: give its token ids, tokenizer([text])["input_ids"]')
    if isinstance(given, Mapping) or (not hasattr(given, "shape") and hasattr(given, "input_ids")):
        raise ValueError(f'{names.tokens} is a {type(given).__name__}: give its ids, {names.tokens}["input_ids"]')
    if isinstance(given, list | tuple | range):
        rows = [_row(f"{names.tokens}[{i}]", row, names, given) for i, row in enumerate(given)]
        if not rows:
            raise ValueError(f"{names.tokens} are empty: there must be at least one {names.row}, of at least one token")
        lengths = np.asarray([len(row) for row in rows], np.int32)
        if 0 in lengths:
            where = f"{names.tokens}[{int(np.argmin(lengths))}] is empty"
            raise ValueError(f"{where}: every {names.row} needs at least one token")
        tokens = np.zeros((len(rows), int(lengths.max())), np.int32)
        for to, row in zip(tokens, rows):
            to[: len(row)] = row
        return tokens, lengths
    tokens = _integers(names.tokens, given, f"token ids [{names.row}s, width]")
    if tokens.ndim == 1:
        raise ValueError(f"{names.tokens} has shape {list(tokens.shape)}: one {names.row} is {names.tokens}[None]")
    if tokens.ndim != 2:
        raise ValueError(f"{names.tokens} must be integers [{names.row}s, width], got {shown(tokens)}")
    if 0 in tokens.shape:
        raise ValueError(f"{names.tokens} are empty (shape {list(tokens.shape)}): every {names.row} needs at least one token")
    return tokens, None


def _row(name: str, row: Any, names: Names, given: Any) -> np.ndarray:
    """One row of a list, int32[tokens]."""
    if isinstance(row, str | bytes):
        raise ValueError(f'{name} is a text, {shown(row)}: give its token ids, tokenizer(texts)["input_ids"]')
    if not isinstance(row, list | tuple | range):
        if isinstance(row, int | np.integer) or getattr(row, "shape", None) == ():
            flat = f"{names.tokens} is a flat list, {shown(given)}"
            raise ValueError(f"{flat}: one {names.row} is a list of ids inside of a list, [[...]]")
        row = _integers(name, row, "a list of token ids")
        if isinstance(row, Tracer):
            raise ValueError(f"{name} is traced: stack traced {names.row}s to an array, jnp.stack({names.tokens})")
        if row.ndim != 1:
            raise ValueError(f"{name} must be a list of token ids, got {shown(row)}")
        row = np.asarray(row).tolist()
    if any(kind is not int for kind in set(map(type, row))):
        row = [_id(f"{name}[{i}]", x, names) for i, x in enumerate(row)]
    if row and not (min(row) >= 0 and max(row) < IDS):
        wrong = next(i for i, x in enumerate(row) if not 0 <= x < IDS)
        raise ValueError(f"{name}[{wrong}]: token id {shown(row[wrong])} is outside the vocabulary, as of any model")
    return np.asarray(row, np.int32)


def _id(name: str, x: Any, names: Names) -> int:
    if isinstance(x, Tracer):
        raise ValueError(f"{name} is traced: stack traced ids to an array, jnp.stack({names.tokens})")
    try:
        if isinstance(x, bool | np.bool_) or "bool" in str(getattr(x, "dtype", "")):
            raise TypeError
        return operator.index(x)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a token id, an integer, got {shown(x)}") from None


def _integers(name: str, given: Any, what: str) -> Array | np.ndarray:
    """An array of integers in the type it came in."""
    if isinstance(given, jax.Array):
        array = given
    else:
        try:
            array = np.asarray(given)
        except Exception:  # whatever an object's own conversion may raise: ragged, on another device, not convertible
            raise ValueError(f"{name} must be {what}, got {shown(given)}") from None
    if not jnp.issubdtype(array.dtype, jnp.integer) and not (array.size == 0 and isinstance(given, list | tuple)):
        raise ValueError(f"{name} must be {what}, integers, got {shown(given)}")
    return array


def read_counts(name: str, given: Any, rows: int, least: int, most: int, *, rule: str = "") -> Int[ArrayLike, " rows"] | None:
    """A count for each row as i32[rows], each of them `least` to `most` where they are known; None stays None.

    Raises:
      ValueError: their type, number or range is another; `rule` says where the greatest comes from.
    """
    if given is None:
        return None
    counts = _integers(name, given, f"integers [{rows}], one for each row")
    if counts.shape != (rows,):
        raise ValueError(f"{name} must be one integer for each row, [{rows}], got shape {list(counts.shape)}")
    if not isinstance(counts, Tracer):
        known = np.asarray(counts)
        wrong = np.flatnonzero((known < least) | (known > most))
        if wrong.size:
            raise ValueError(f"{name}[{wrong[0]}] is {known[wrong[0]]}, but must be {least} to {rule}{most}")
    return as_int32(counts)


def check_tokens(tokens: Array | np.ndarray, real: Array | np.ndarray | None, vocab_size: int, name: str) -> None:
    """Raise ValueError if one of each row's first `real` token ids (None: all), where they are known, is outside the vocabulary."""
    if isinstance(tokens, Tracer) or isinstance(real, Tracer):
        return
    ids = np.asarray(tokens)
    wrong = (ids < 0) | (ids >= vocab_size)
    if real is not None:
        wrong &= np.arange(ids.shape[1])[None, :] < np.asarray(real)[:, None]
    if wrong.any():
        row, place = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"{name}[{row}][{place}]: token id {ids[row, place]} is outside the vocabulary (0 to {vocab_size - 1})"
        )


def read_ends(given: Any, known: tuple[int, ...], vocab_size: int) -> Int[ArrayLike, " ends"]:
    """End tokens as i32[n]: one id, several, or the model's own for None; n is 0 for ().

    Raises:
      ValueError: they are no ids of the vocabulary, or of the model's own.
    """
    name, what = "eos_token_id", "an id, a list of ids, () for none or None for the model's own"
    if given is None:
        return as_int32(np.asarray(known, np.int32))
    if isinstance(given, list | tuple):
        given = np.asarray([integer(name, x, -IDS) for x in given], np.int64)
    ends = _integers(name, given, what)
    if ends.ndim > 1:
        raise ValueError(f"{name} must be {what}, got {shown(ends)}")
    if not isinstance(ends, Tracer):
        for x in np.ravel(np.asarray(ends)).tolist():
            if not 0 <= x < vocab_size and x not in known:
                raise ValueError(f"{name} {x} is outside the vocabulary (0 to {vocab_size - 1}); () is for no end token")
    return jnp.atleast_1d(as_int32(ends)) if isinstance(ends, Tracer) else as_int32(np.atleast_1d(np.asarray(ends)))
