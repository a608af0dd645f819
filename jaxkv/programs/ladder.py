"""The sizes that programs are compiled for outside a caller's jit: every size is rounded up to the next rung.

    what                                rungs                       why no finer
    tokens of a sequence                1,024  4,096  16,384 ...    a wider table costs memory, no time
    tokens of a prompt                  16  64, then as a sequence  a chunk of short prompts costs a quarter, and a quarter of that
    rows, prompts                       1  2  4  8  16 ...          a row costs its share of a step
    end tokens                          4  8  16 ...                compared with each token, for nothing
    pages                               128 MiB, four times that ...    memory alone, so the smallest rung is what nobody misses
    tokens computed at once             1  16  32  64  128 ...      each costs time, so twice as many is the most

`docs/measurements.md`, "Rungs of the ladder", has the figures.
"""

import jax
import numpy as np
from jax.core import Tracer

SEQUENCE, GROWTH = 1024, 4
"""Tokens of the shortest sequence that a program has room for, and the factor from rung to rung."""
PROMPTS = (16, 64)
"""Tokens of short prompts."""
ENDS = 4
COMPUTED = 16
POOL_BYTES = 128 * 2**20
"""A pool of pages that is not worth a program of its own."""


def rung(size: int, first: int, growth: int, most: int | None = None) -> int:
    """The least of first, first * growth, ... that is no less than `size`; `most`, where it is given and less.

    >>> rung(5, 4, 2), rung(4, 4, 2), rung(100, 64, 4, 200), rung(300, 64, 4, 200)
    (8, 4, 200, 200)
    """
    step = first
    while step < size:
        step *= growth
    return step if most is None else min(step, most)


def rows(count: int, most: int | None = None) -> int:
    """Rows, or prompts."""
    return rung(count, 1, 2, most)


def sequence(tokens: int, most: int) -> int:
    """Room for a sequence of so many tokens, in a model that allows `most`."""
    return rung(tokens, SEQUENCE, GROWTH, most)


def prompt(tokens: int, most: int) -> int:
    """Width of an array of prompts, of up to `tokens` each."""
    short = [size for size in PROMPTS if tokens <= size]
    return min(short[0], most) if short else sequence(tokens, most)


def ends(count: int) -> int:
    """Places for ids that end a sequence."""
    return rung(count, ENDS, 2)


def computed(tokens: int, most: int | None = None) -> int:
    """Tokens that a program computes at once; one alone has a rung of its own."""
    return 1 if tokens == 1 else rung(tokens, COMPUTED, 2, most)


def pages(needed: int, page_bytes: int, most: int) -> int:
    """Pages of a pool, the null page included, given those that are needed and those that can be in use at most."""
    return rung(needed, max(1, POOL_BYTES // page_bytes), GROWTH, most)


def inside_a_jit() -> bool:
    """Whether a caller's `jax.jit` (or a loop, `shard_map`, `checkpoint`: whatever traces) is being traced: shapes are the caller's then.

    An operation on a constant becomes part of what is traced there, and is done at once everywhere else, under `jax.grad` and `jax.vmap`
    too. (This one compiles nothing.)
    """
    return isinstance(jax.device_put(np.int32(0)), Tracer)


def on_several_devices(*trees: object) -> bool:
    """Whether an array is divided over devices: padding would move it."""
    leaves = (x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    return any(len(x.devices()) > 1 for x in leaves)
