"""What every way of decoding does with its inputs, once: prompts as arrays, lengths and limits, keys, end tokens, and their checks.

All checks run before any work and look only at what is known now: values that jax is tracing pass.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Key

from jaxkv.config import ModelConfig, pages_for, shown
from jaxkv.model.token_ids import IDS, ArrayLike, as_int32, read_counts, read_ends, read_tokens
from jaxkv.ops.numerics import Numerics

Prompts = Int[Array | np.ndarray, "num_prompts width"] | Sequence[Sequence[int]]
"""Prompts as users give them: right-padded ids, or a list of lists of ids."""
Ends = int | Sequence[int] | Array | None
"""End tokens as users give them; None is the model's own, () is none."""


def pad_prompts(
    prompts: Any, lengths: Any = None, vocab_size: int = IDS
) -> tuple[Int[ArrayLike, "num_prompts width"], Int[ArrayLike, " num_prompts"]]:
    """Prompts as an array and their lengths; lists of ids are padded on the right with 0. See `read_tokens` for what is refused."""
    return read_tokens(prompts, lengths, vocab_size=vocab_size)


def check_flags(**values: Any) -> None:
    """Raise ValueError for the first value that is not True or False."""
    for name, flag in values.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"{name} must be True or False, got {shown(flag)}")


def numerics_of(implementation: Any, deterministic: Any) -> Numerics:
    """How numbers are computed, out of two arguments that many functions take.

    Raises:
      ValueError: one of them is something else.
    """
    check_flags(deterministic=deterministic)
    if implementation is not None and not isinstance(implementation, str):
        raise ValueError(f"implementation must be None or a name, got {shown(implementation)}")
    return Numerics(implementation, bool(deterministic))


def longest_known(lengths: Int[ArrayLike, " num_prompts"], width: int) -> int:
    """Tokens of the longest prompt, or of the array's width where lengths are traced."""
    return width if isinstance(lengths, Tracer) else int(np.max(np.asarray(lengths)))


def longest_sequence(config: ModelConfig, lengths: Int[ArrayLike, " num_prompts"], width: int, max_new: int) -> int:
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


def token_limits(limits: Any, num_prompts: int, max_new: int) -> Int[ArrayLike, " num_prompts"]:
    """Tokens to generate for each prompt, `max_new` unless limits are given.

    Raises:
      ValueError: their number is wrong, or one is not 1 to `max_new`.
    """
    counts = read_counts("token_limits", limits, num_prompts, 1, max_new, rule="max_new_tokens = ")
    if counts is None:
        return as_int32(np.full(num_prompts, max_new))
    return jnp.clip(counts, 1, max_new) if isinstance(counts, Tracer) else counts


def check_pool(num_pages: int, page_size: int, longest: int, what: str) -> None:
    """Raise ValueError if a pool cannot hold one sequence of `longest` tokens."""
    need = pages_for(longest, page_size) + 1
    if num_pages < need:
        raise ValueError(
            f"num_pages is {num_pages}, but one sequence of {longest} tokens ({what}) needs {need} pages of {page_size} tokens, the "
            "null page included"
        )


def read_keys(key: Any, num_prompts: int, *, greedy: bool) -> Key[Array, "*num_prompts"] | None:
    """One key for all prompts or one for each, as given; None where none is needed. See `Job.keys_of`.

    Raises:
      ValueError: there is none and it is needed, it is no key, or their number is wrong.
    """
    if key is None and not greedy:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed)")
    keys = None if key is None else _as_keys(key)
    if keys is not None and keys.shape not in ((), (num_prompts,)):
        raise ValueError(f"key must be one key or one per prompt ({num_prompts}), got shape {list(keys.shape)}")
    return None if greedy else keys


def _as_keys(key: Any) -> Key[Array, "..."]:
    """Keys as they are, or what an old-style uint32 key stands for."""
    dtype = getattr(key, "dtype", None)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if isinstance(key, jax.Array | np.ndarray) and dtype == np.uint32 and key.ndim in (1, 2):
        try:
            return jax.random.wrap_key_data(jnp.asarray(key))
        except (TypeError, ValueError):  # its last axis is not that of a key
            pass
    seed = shown(key) if isinstance(key, int | np.integer) and not isinstance(key, bool) else "seed"
    raise ValueError(f"key must be a key of jax.random, got {shown(key)}: pass key=jax.random.key({seed})")


def token_keys(keys: Key[Array, " rows"], sample: Int[Array, " rows"], position: Int[Array, " rows"]) -> Key[Array, " rows"]:
    """The key that a token is drawn with: that of its prompt, folded with the number of its sample and then with its position."""
    return jax.vmap(lambda k, s, p: jax.random.fold_in(jax.random.fold_in(k, s), p))(keys, sample, position)


def end_tokens(config: ModelConfig, ends: Any) -> Int[ArrayLike, " ends"]:
    """End tokens as i32[n]: the model's own for None; n is 0 for (). See `read_ends` for what is refused."""
    return read_ends(ends, config.eos_token_ids, config.vocab_size)
