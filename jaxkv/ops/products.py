"""Activations times weights: the form of a product that is fastest for its platform, dtype and rows, and rows in fixed tiles.

A product's bits depend on its number of rows: it is cut among threads and vector lanes by it. In deterministic mode rows are
therefore computed in tiles of one size, and nothing is fused with a tile that could change how its sums are formed or rounded.
"""

import functools
import platform
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.ops.numerics import DEFAULT, Numerics

SUMS_ARE_FAST = platform.machine() in ("x86_64", "AMD64")
LONG = 2048
"""Few rows by a weight whose rows are shorter than this are summed product by product, where that was measured to be faster.

XLA hands such sums to the library that does its products, too, which then cuts them better: SmolLM2's products take 17 ms instead
of 22 for 8 rows, 21 instead of 26 for 16, 14 instead of 19 for one of bfloat16; from 2,048 on they take longer."""
FEW = 64
"""Up to so many float32 rows: SmolLM2's products take 49 ms instead of 53 for 64, 93 instead of 89 for 128."""

TILE = 32
"""Rows of one tile in deterministic mode."""
FLOAT32_TILE = 16
"""Rows of one float32 product's tile.

CPU products get slower by less than their rows up to about these sizes. SmolLM2's take 12 ms for one float32 row, 18 for 8, 22 for
16, 31 for 32; 14 ms for one bfloat16 row, 18 for 2 to 16, 22 for 32. Smaller tiles serve a single row better and 64 rows worse."""

WEIGHTS_IN_BLOCKS, BLOCK = jax.__version_info__ >= (0, 11), 64
"""Many tiles go over the weight in blocks of so many rows, where the library does not cut it into such blocks by itself: with
jaxlib 0.12 SmolLM2's products for 64 rows take 60 ms instead of 71. With 0.10.2 the same takes up to a hundred times as long."""

FUSES_SLICES = jax.__version_info__ >= (0, 11)
FEW_NARROW = 2 if FUSES_SLICES else 1
"""Up to so many bfloat16 rows. Where the compiler fuses slices into a loop of its own over the weight, that beats the library: with
jaxlib 0.12 a step of SmolLM2 takes 11 ms instead of 15 for one row, 13 instead of 22 for 2, for one or three seconds more of
compilation; 3 rows gain nothing. With 0.10.2, which cuts the slices out first, the products alone would take 80 ms."""

MANY = 128
"""From more rows than this the weight is repacked, which then costs less than it saves: SmolLM2's layers take 105 ms for 129 rows
with the weight on the left, 78 on the right, and 75 either way for 128."""


def _cpu_product(x: Array, weight: Array) -> Array:
    """x [rows, in], weight [out, in] -> [rows, out], with the weight as the left operand unless there are many rows.

    On the right, XLA's CPU products repack the whole weight at every call. Without the barrier the transpose is folded into the
    product and the operands swap back. Asked for float32, a bfloat16 product accumulates in it and reads the weight once; asked
    for bfloat16, jaxlib 0.10.2 may convert the whole weight first. A single bfloat16 row takes a scalar path ten times slower
    than two rows.
    """
    rows, width = x.shape
    narrow = x.dtype == jnp.bfloat16
    if rows > MANY:
        return _weight_right(x, weight)
    fewest, most = (1, FEW_NARROW) if narrow else (2, FEW)
    if SUMS_ARE_FAST and width < LONG and fewest <= rows <= most:
        y = _sums(weight, x)
    else:
        x = jnp.concatenate([x, x]) if narrow and rows == 1 else x
        y = _dot(weight, x)
    return lax.optimization_barrier(y).T[:rows].astype(x.dtype)


def _dot(weight: Array, x: Array) -> Array:
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_jvp
def _sums(weight: Array, x: Array) -> Array:
    """`_dot` as a sum of products; its derivatives are products again, which need no memory for [out, rows, in] numbers."""
    # Without the barrier a loop around it converts all bfloat16 weights to float32 first, and reads those.
    weight, x = lax.optimization_barrier((weight, x))
    lanes = 64 // x.shape[0]
    if weight.dtype == jnp.bfloat16 and FUSES_SLICES and x.shape[1] % lanes == 0:
        return _sums_in_lanes(weight, x, lanes)
    w, x = weight.astype(jnp.float32), x.astype(jnp.float32)
    if x.shape[0] == 1:
        return jnp.sum(w * x, axis=1, keepdims=True)
    return jnp.sum(w[:, None, :] * x[None, :, :], axis=-1)


def _sums_in_lanes(weight: Array, x: Array, lanes: int) -> Array:
    """First the sums of every lanes-th product, side by side: plain arithmetic on slices, in one pass over each row of the weight."""
    cut = lambda y, i: y[:, i : i + lanes].astype(jnp.float32)
    products = (cut(weight, i)[:, None] * cut(x, i)[None] for i in range(0, x.shape[1], lanes))
    return jnp.sum(lax.optimization_barrier(functools.reduce(jnp.add, products)), axis=-1)


@_sums.defjvp
def _sums_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (weight, x), (d_weight, d_x) = primals, tangents
    return _sums(weight, x), _dot(d_weight, x) + _dot(weight, d_x)


def _weight_right(x: Array, weight: Array) -> Array:
    """The same product as GPU and TPU compilers like it: nothing to work around."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def _product(x: Array, weight: Array) -> Array:
    return lax.platform_dependent(x, weight, cpu=_cpu_product, default=_weight_right)


def in_row_tiles(f: Callable[..., Array], rows: tuple[Array, ...], shared: tuple[Array, ...]) -> Array:
    """`f(*rows, *shared)`, computed TILE rows at a time: a row's bits then never depend on how many rows there are.

    The gradient is that of `f` itself: only values must agree between rollout and training.

    Args:
      f: takes arrays whose first axis is rows, then the shared ones; returns one whose first axis is rows. Treats each row alike.
      rows: `[rows, ...]` each, the first one floating.
      shared: read by every tile, such as weights.
    """
    return _tiled(functools.partial(_in_turn, f, TILE), f, rows, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _values_of(compute: Callable[[tuple, tuple], Array], f: Callable[..., Array], rows: tuple, shared: tuple) -> Array:
    return compute(rows, shared)


def _forward(
    compute: Callable[[tuple, tuple], Array], f: Callable[..., Array], rows: tuple, shared: tuple
) -> tuple[Array, tuple]:
    return compute(rows, shared), (rows, shared)


def _backward(compute: Callable[[tuple, tuple], Array], f: Callable[..., Array], saved: tuple, g: Array) -> tuple:
    return jax.vjp(lambda rows, shared: f(*rows, *shared), *saved)[1](g)


_values_of.defvjp(_forward, _backward)


def _tiled(compute: Callable[[tuple, tuple], Array], f: Callable[..., Array], rows: tuple, shared: tuple) -> Array:
    """The values of compute(rows, shared) with the derivatives of f(*rows, *shared)."""
    return cast(Array, _values_of(compute, f, rows, shared))


def _padded(x: Array, tile: int) -> Array:
    return jnp.pad(x, [(0, -x.shape[0] % tile)] + [(0, 0)] * (x.ndim - 1))


def apart(f: Callable[..., Array], *args: Array) -> Array:
    """f(*args), with which the compiler cannot fuse anything around it: in a branch that is always taken, which it cannot know.
    The first argument is floating."""
    something = lax.bitcast_convert_type(args[0].reshape(-1)[0].astype(jnp.float32), jnp.int32)
    out = jax.eval_shape(f, *args)
    return lax.cond((something | 1) != 0, f, lambda *_: jnp.zeros(out.shape, out.dtype), *args)


def _in_turn(f: Callable[..., Array], tile: int, rows: tuple, shared: tuple) -> Array:
    """Tiles one after the other. Each is taken out of the rows before `f` sees it: what the compiler makes of `f` is then the same
    for the only tile as for one of many."""
    count = rows[0].shape[0]
    padded = [_padded(x, tile) for x in rows]
    tiles = padded[0].shape[0] // tile

    def turn(i: Array, y: Array) -> Array:
        part = [lax.dynamic_slice_in_dim(x, i * tile, tile) for x in padded]
        return lax.dynamic_update_slice_in_dim(y, apart(f, *part, *shared), i * tile, 0)

    out = jax.eval_shape(f, *(x[:tile] for x in padded), *shared)
    return lax.fori_loop(0, tiles, turn, jnp.zeros((tiles * tile, *out.shape[1:]), out.dtype))[:count]


def _side_by_side(x: Array, weight: Array) -> Array:
    """Float32 tiles as one sum of products with an axis of tiles: the weight is read once, and a tile's bits are those of a
    tile alone, which the tests check: how many tiles there are does not change how the library cuts one.

    A single tile has no axis of tiles: jaxlib 0.10.2 gives wrong numbers where that has the length one.
    """
    tiles = _padded(x, FLOAT32_TILE).reshape(-1, FLOAT32_TILE, x.shape[1])
    if tiles.shape[0] == 1:
        y = apart(lambda tile, weight: jnp.sum(weight[:, None, :] * tile[None], axis=-1).T, tiles[0], weight)
    elif WEIGHTS_IN_BLOCKS and weight.shape[0] % BLOCK == 0:
        blocks = weight.reshape(-1, BLOCK, weight.shape[1])
        many = lambda tiles, blocks: jnp.sum(blocks[:, None, :, None, :] * tiles[None, :, None], axis=-1).transpose(1, 3, 0, 2)
        y = apart(many, tiles, blocks)
    else:
        many = lambda tiles, weight: jnp.sum(weight[None, :, None, :] * tiles[:, None], axis=-1).swapaxes(1, 2)
        y = apart(many, tiles, weight)
    return y.reshape(-1, weight.shape[0])[: x.shape[0]]


def _tiled_product(x: Array, weight: Array) -> Array:
    if x.dtype != jnp.float32:
        return in_row_tiles(_product, (x,), (weight,))

    def compute(rows: tuple, shared: tuple) -> Array:
        in_turn = lambda *args: _in_turn(_product, FLOAT32_TILE, args[:1], args[1:])
        if not SUMS_ARE_FAST or weight.shape[0] == 1:
            return in_turn(*rows, *shared)
        return lax.platform_dependent(*rows, *shared, cpu=_side_by_side, default=in_turn)

    return _tiled(compute, _product, (x,), (weight,))


def linear(x: Float[Array, "tokens in"], weight: Array, bias: Array | None = None, numerics: Numerics = DEFAULT) -> Array:
    """x times the transposed weight, plus the bias.

    Args:
      x: inputs, of the weight's dtype.
      weight: `[*out, in]`; any number of output axes.
      bias: `[*out]` or None.
      numerics: how it is computed.

    Returns:
      `[tokens, *out]` in x's dtype.
    """
    flat = weight.reshape(-1, weight.shape[-1])
    y = _tiled_product(x, flat) if numerics.deterministic else _product(x, flat)
    y = y.reshape(x.shape[0], *weight.shape[:-1])
    return y if bias is None else y + bias[None]
