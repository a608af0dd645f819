"""What every way of decoding does with its inputs, once: prompts as arrays, lengths and limits, keys, end tokens, and their checks.

All checks run before any work and look only at what is known now: values that jax is tracing pass.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Key

from jaxkv.config import ModelConfig, pages_for

Prompts = Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]]
"""Prompts as users give them: right-padded ids, or a list of lists of ids."""
Ends = int | Sequence[int] | Array | None
"""End tokens as users give them; None is the model's own, () is none."""


def pad_prompts(
    prompts: Prompts, lengths: Int[Array | np.ndarray, " num_prompts"] | None = None
) -> tuple[Int[Array, "num_prompts width"], Int[Array, " num_prompts"]]:
    """Prompts as an array and their lengths; lists of ids are padded on the right with 0.

    Raises:
      ValueError: no prompts, an empty one, or lengths that do not fit.
    """
    if isinstance(prompts, (list, tuple)):
        if lengths is not None:
            raise ValueError("prompt_lengths goes with an array of prompts; lists have lengths of their own")
        if not prompts:
            raise ValueError("prompts are empty: there must be at least one, of at least one token")
        lengths = np.asarray([len(p) for p in prompts], np.int32)
        prompts = np.asarray([[*p, *[0] * (max(lengths) - len(p))] for p in prompts], np.int32).reshape(len(lengths), -1)
    prompts = jnp.asarray(prompts)
    if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise ValueError(f"prompts must be integers [num_prompts, width], got {prompts.dtype}{list(prompts.shape)}")
    if 0 in prompts.shape:
        raise ValueError(f"prompts are empty (shape {list(prompts.shape)}): every prompt needs at least one token")
    lengths = jnp.full(prompts.shape[0], prompts.shape[1], jnp.int32) if lengths is None else jnp.asarray(lengths)
    if lengths.shape != (prompts.shape[0],):
        raise ValueError(f"prompt_lengths must be [num_prompts] = [{prompts.shape[0]}], got shape {list(lengths.shape)}")
    wrong = first_outside(lengths, 1, prompts.shape[1])
    if wrong is not None:
        raise ValueError(f"prompt {wrong} has length {lengths[wrong]}, but must have 1 to {prompts.shape[1]} tokens")
    return prompts.astype(jnp.int32), lengths.astype(jnp.int32)


def first_outside(values: Array, least: int, most: int) -> int | None:
    """Index of the first value outside of [least, most], None where there is none or the values are traced."""
    if isinstance(values, Tracer):
        return None
    known = np.asarray(values)
    wrong = np.flatnonzero((known < least) | (known > most))
    return int(wrong[0]) if wrong.size else None


def check_tokens(tokens: Int[Array, "rows width"], real: Int[Array, " rows"], vocab_size: int) -> None:
    """Raise ValueError if one of each row's first `real` token ids, where they are known now, is outside the vocabulary."""
    if isinstance(tokens, Tracer) or isinstance(real, Tracer):
        return
    ids = np.asarray(tokens)
    ids = ids[np.arange(ids.shape[1])[None, :] < np.asarray(real)[:, None]]
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary (0 to {vocab_size - 1})")


def check_counts(**values: int | None) -> None:
    """Raise ValueError for the first value that is neither None nor an integer >= 1."""
    for name, n in values.items():
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {n!r}")


def longest_known(lengths: Int[Array, " num_prompts"], width: int) -> int:
    """Tokens of the longest prompt, or of the array's width where lengths are traced."""
    return width if isinstance(lengths, Tracer) else int(np.max(np.asarray(lengths)))


def longest_sequence(config: ModelConfig, lengths: Int[Array, " num_prompts"], width: int, max_new: int) -> int:
    """Tokens that a sequence may get to; from the width, so that other lengths do not recompile.

    Raises:
      ValueError: the model does not allow so many.
    """
    allowed, known = config.max_seq_len, longest_known(lengths, width)
    if known + max_new > allowed:
        raise ValueError(
            f"a prompt of {known} tokens and {max_new} new ones are {known + max_new}, but the model allows {allowed}: shorten "
            "the prompt or max_new_tokens"
        )
    return min(width + max_new, allowed)


def token_limits(limits: Array | np.ndarray | None, num_prompts: int, max_new: int) -> Int[Array, " num_prompts"]:
    """Tokens to generate for each prompt, `max_new` unless limits are given.

    Raises:
      ValueError: their number is wrong, or one is not 1 to `max_new`.
    """
    if limits is None:
        return jnp.full(num_prompts, max_new, jnp.int32)
    limits = jnp.asarray(limits, jnp.int32)
    if limits.shape != (num_prompts,):
        raise ValueError(f"token_limits must be [num_prompts] = [{num_prompts}], got shape {list(limits.shape)}")
    wrong = first_outside(limits, 1, max_new)
    if wrong is not None:
        raise ValueError(f"token_limits[{wrong}] is {limits[wrong]}, but must be 1 to max_new_tokens = {max_new}")
    return jnp.clip(limits, 1, max_new)


def check_pool(num_pages: int, page_size: int, longest: int, what: str) -> None:
    """Raise ValueError if a pool cannot hold one sequence of `longest` tokens."""
    need = pages_for(longest, page_size) + 1
    if num_pages < need:
        raise ValueError(
            f"num_pages is {num_pages}, but one sequence of {longest} tokens ({what}) needs {need} pages of {page_size} tokens, the "
            "null page included"
        )


def prompt_keys(key: Array | None, num_prompts: int, *, greedy: bool) -> Key[Array, " num_prompts"]:
    """One key per prompt: `fold_in(key, i)` out of one key, or keys as they are given; some key where none is needed.

    Raises:
      ValueError: there is none and it is needed, or their number is wrong.
    """
    if key is None and not greedy:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    keys: Array = jax.random.key(0) if key is None else key
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(keys)  # an old-style uint32 key
    if keys.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys, jnp.arange(num_prompts, dtype=jnp.int32))
    if keys.shape != (num_prompts,):
        raise ValueError(f"key must be one key or one per prompt ({num_prompts}), got shape {list(keys.shape)}")
    return keys


def token_keys(keys: Key[Array, " rows"], sample: Int[Array, " rows"], position: Int[Array, " rows"]) -> Key[Array, " rows"]:
    """The key that a token is drawn with: that of its prompt, folded with the number of its sample and then with its position."""
    return jax.vmap(lambda k, s, p: jax.random.fold_in(jax.random.fold_in(k, s), p))(keys, sample, position)


def end_tokens(config: ModelConfig, ends: Ends) -> Int[Array, " ends"]:
    """End tokens as i32[n]: the model's own for None; n is 0 for ()."""
    ends = config.eos_token_ids if ends is None else ends
    return jnp.atleast_1d(jnp.asarray(ends, jnp.int32))
