"""Functions of rows in tiles of a fixed number of rows, for bits that do not depend on how many rows there are.

Sums are cut among threads and vector lanes by the number of rows, and what the compiler fuses with a sum changes how it is rounded. So
each tile is computed alone, and nothing around it is fused with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.varying import fori_loop, vary_like

TILE = 32
"""Rows of one tile: CPU products get slower by less than their rows up to about this many (docs/measurements.md, "Size of a tile")."""


def unfused(f: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """f(*args), which the compiler fuses with nothing around it: it stands in a branch that is always taken, which the compiler cannot
    know. An `optimization_barrier` would not do, since XLA on CPU removes it before it fuses. The first argument is floating."""
    something = lax.bitcast_convert_type(args[0].reshape(-1)[0].astype(jnp.float32), jnp.int32)
    out = jax.eval_shape(f, *args)
    return lax.cond((something | 1) != 0, f, lambda *_: vary_like(jnp.zeros(out.shape, out.dtype), args), *args)


def padded(x: jax.Array, tile: int) -> jax.Array:
    """x with zeros behind its rows, up to a multiple of `tile`."""
    return jnp.pad(x, [(0, -x.shape[0] % tile)] + [(0, 0)] * (x.ndim - 1))


def in_turn(f: Callable[..., jax.Array], tile: int, rows: tuple, shared: tuple) -> jax.Array:
    """f(*rows, *shared), one tile after the other.

    Each tile is taken out of the rows before `f` sees it, in a loop even when there is one: the compiler drops the slice of an only tile,
    and would fuse the slices of several with the sums of `f`.
    """
    count = rows[0].shape[0]
    whole = [padded(x, tile) for x in rows]
    tiles = whole[0].shape[0] // tile

    def turn(i: jax.Array, y: jax.Array) -> jax.Array:
        part = [lax.dynamic_slice_in_dim(x, i * tile, tile) for x in whole]
        return lax.dynamic_update_slice_in_dim(y, unfused(f, *part, *shared), i * tile, 0)

    out = jax.eval_shape(f, *(x[:tile] for x in whole), *shared)
    start = jnp.zeros((tiles * tile, *out.shape[1:]), out.dtype)
    return fori_loop(jnp.int32(0), jnp.int32(tiles), turn, start, rows, shared)[:count]


def in_row_tiles(f: Callable[..., jax.Array], rows: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> jax.Array:
    """`f(*rows, *shared)`, computed TILE rows at a time: a row's bits then never depend on how many rows there are.

    The gradient is that of `f` itself: only values must agree between rollout and training.

    Args:
      f: takes arrays whose first axis is rows, then the shared ones; returns one whose first axis is rows. Treats each row alike.
      rows: `[rows, ...]` each, the first one floating.
      shared: read by every tile, such as weights.

    Returns:
      What f returns, with as many rows as were given.
    """
    return cast(jax.Array, _tiled(f, rows, shared))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(f: Callable[..., jax.Array], rows: tuple, shared: tuple) -> jax.Array:
    return in_turn(f, TILE, rows, shared)


def _forward(f: Callable[..., jax.Array], rows: tuple, shared: tuple) -> tuple[jax.Array, tuple]:
    return in_turn(f, TILE, rows, shared), (rows, shared)


def _backward(f: Callable[..., jax.Array], saved: tuple, g: jax.Array) -> tuple:
    return jax.vjp(lambda rows, shared: f(*rows, *shared), *saved)[1](g)


_tiled.defvjp(_forward, _backward)
