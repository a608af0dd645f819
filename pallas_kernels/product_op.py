"""Activations times weights: the public operation checks, picks the form of the product and carries its derivative."""

from __future__ import annotations

import functools
import math
import platform as host
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import runs_natively
from pallas_kernels.dispatch import Place, broadcast, make_operation, one_by_one
from pallas_kernels.options import FLOAT_DTYPES
from pallas_kernels.product_sums import product_sums
from pallas_kernels.product_sums_in_lanes import LANES, lanes_refusal, product_sums_in_lanes
from pallas_kernels.product_tiles_in_turn import product_tiles_in_turn, tile_rows
from pallas_kernels.product_tiles_side_by_side import product_tiles_side_by_side, side_by_side_refusal
from pallas_kernels.product_weight_left import product_weight_left
from pallas_kernels.product_weight_right import product_weight_right

FORMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "weight_right": product_weight_right,
    "weight_left": product_weight_left,
    "sums": product_sums,
    "sums_in_lanes": product_sums_in_lanes,
}
TILE_FORMS = ("tiles_side_by_side", "tiles_in_turn")
IMPLEMENTATIONS = ("xla", "cpu", *FORMS, *TILE_FORMS)

SUMS_ARE_FAST = host.machine() in ("x86_64", "AMD64")
"""XLA hands sums of products to a library that was measured on x86 only."""
FUSES_SLICES = jax.__version_info__ >= (0, 11)
LONG = 2048
"""From so many inputs on, few rows are faster as a product than as a sum (docs/measurements.md, "Sum of products for few rows")."""
FEW, FEW_NARROW = 64, 2 if FUSES_SLICES else 1
"""Up to so many rows a sum is faster than a product, FEW_NARROW in bfloat16 (docs/measurements.md, "Sum of products for few rows",
"One and two bfloat16 rows on jaxlib 0.12")."""
MANY = 128
"""From more rows than this on, repacking a weight on the right costs less than it saves (docs/measurements.md, "Weight on the right for
many rows")."""


def best_form(platform: str, rows: int, width: int, dtype: jax.typing.DTypeLike) -> str:
    """The fastest of FORMS on a platform for rows of `width` inputs."""
    if platform != "cpu" or rows > MANY:
        return "weight_right"
    narrow = jnp.dtype(dtype) == jnp.bfloat16
    fewest, most = (1, FEW_NARROW) if narrow else (2, FEW)
    if not (SUMS_ARE_FAST and width < LONG and fewest <= rows <= most):
        return "weight_left"
    return "sums_in_lanes" if narrow and FUSES_SLICES and width % (LANES // rows) == 0 else "sums"


def best_tile_form(platform: str, outputs: int, dtype: jax.typing.DTypeLike) -> str:
    """The fastest of TILE_FORMS on a platform for a weight of so many outputs."""
    fast = platform == "cpu" and SUMS_ARE_FAST and side_by_side_refusal(dtype, outputs) is None
    return "tiles_side_by_side" if fast else "tiles_in_turn"


def _refusal(name: str, rows: int, width: int, outputs: int, dtype: jax.typing.DTypeLike) -> str | None:
    """Why a form cannot take the call, or None."""
    if name == "sums_in_lanes":
        return lanes_refusal(rows, width)
    return side_by_side_refusal(dtype, outputs) if name == "tiles_side_by_side" else None


def _run(
    place: Place, x: jax.Array, weight: jax.Array, *live: jax.Array, deterministic: bool, implementation: str | None
) -> list[jax.Array]:
    rows, width = x.shape
    name = implementation
    if runs_natively(name, place):
        from pallas_kernels.cpu.product import product_cpu

        return [product_cpu(x, weight, *live)]
    if name in (None, "xla"):
        tiled = best_tile_form(place.platform, math.prod(weight.shape[:-1]), x.dtype)
        name = tiled if deterministic else best_form(place.platform, rows, width, x.dtype)
    if name == "tiles_side_by_side":
        return [product_tiles_side_by_side(x, weight)]
    if name == "tiles_in_turn":
        return [product_tiles_in_turn(x, weight, FORMS[best_form(place.platform, tile_rows(x.dtype), width, x.dtype)])]
    return [FORMS[name](x, weight)]


def _results(
    x: jax.ShapeDtypeStruct, weight: jax.ShapeDtypeStruct, *live: jax.ShapeDtypeStruct, **static
) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((x.shape[0], *weight.shape[:-1]), x.dtype)]


def _batch(operation: Callable, size: int, arrays: list, batched: list[bool], **static) -> list[jax.Array]:
    """More rows, where all share one weight; else a product with a batch axis, or one after the other where a form or fixed tiles are
    asked for."""
    x, weight, *live = arrays
    if not batched[1]:
        x, *live = broadcast(size, [x, *live], [batched[0], *batched[2:]])
        rows = x.shape[1]
        (y,) = operation(x.reshape(size * rows, x.shape[2]), weight, *(mask.reshape(-1) for mask in live), **static)
        return [y.reshape(size, rows, *y.shape[1:])]
    if static["deterministic"] or static["implementation"] not in (None, "xla"):
        return one_by_one(operation, arrays, batched, **static)
    x = x if batched[0] else jnp.broadcast_to(x[None], (size, *x.shape))
    dims = (((2,), (weight.ndim - 1,)), ((0,), (0,)))
    return [lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32).astype(x.dtype)]


_operation = make_operation("product", run=_run, results=_results, batch=_batch)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _product(
    x: jax.Array, weight: jax.Array, live: jax.Array | None, deterministic: bool, implementation: str | None
) -> jax.Array:
    arrays = (x, weight) if live is None else (x, weight, live)
    return _operation(*arrays, deterministic=deterministic, implementation=implementation)[0]


@_product.defjvp
def _tangent(deterministic: bool, implementation: str | None, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """Values by the form that was asked for; derivatives of the plain product, which no form changes."""
    (x, weight, live), (dx, d_weight, _) = primals, tangents
    dims = (((1,), (weight.ndim - 1,)), ((), ()))
    wide = lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    value = cast(jax.Array, _product(x, weight, live, deterministic, implementation))
    return value, (wide(dx, weight) + wide(x, d_weight)).astype(x.dtype)


def product(
    x: jax.Array,
    weight: jax.Array,
    *,
    live: jax.Array | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """x times the transposed weight, summed in float32. Works under `jax.jit`, `jax.vmap`, and `jax.grad` of any order.

    Args:
      x: [rows, in], float32, bfloat16 or float16.
      weight: [*out, in] in x's dtype, with any number of output axes.
      live: bool[rows], the rows that are needed, or None for all. The results of the others mean nothing: the native kernels do not compute
        them, and cost what the live rows cost; XLA's forms do.
      deterministic: a row's bits do not depend on how many rows there are: XLA's forms compute in tiles of a fixed number of rows then.
      implementation: None for the best one of the platform that the program is lowered for: "cpu", the native kernels, on a CPU where they
        are built, else "xla". "cpu" needs no tiles: a row's bits never depend on how many there are. "xla" is the best of XLA's forms,
        which have names, too: "weight_right", "weight_left", "sums", "sums_in_lanes", and in tiles "tiles_side_by_side", "tiles_in_turn".
        The first four depend on the number of rows to the bit, and do not go with `deterministic`.

    Returns:
      [rows, *out] in x's dtype.

    Raises:
      ValueError: a shape or dtype is wrong, the name is unknown, or the form named is not deterministic where that was asked for.
      NotImplementedError: the implementation asked for by name cannot take these arrays, or cannot run where the program is lowered for;
        the message says why.
    """
    if x.ndim != 2 or weight.ndim < 1 or x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x must be [rows, in] and weight [*out, in], got shapes {x.shape} and {weight.shape}")
    if x.dtype != weight.dtype or jnp.dtype(x.dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"x and weight must have one dtype of {FLOAT_DTYPES}, got {x.dtype} and {weight.dtype}")
    if live is not None and (live.shape != x.shape[:1] or live.dtype != jnp.bool_):
        raise ValueError(f"live must be bool[rows = {x.shape[0]}] or None, got {live.dtype}{list(live.shape)}")
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
        if deterministic and implementation in FORMS:
            raise ValueError(
                f"deterministic=True takes implementation None, 'xla', 'cpu' or one of {TILE_FORMS}, got {implementation!r}"
            )
    if 0 in x.shape or 0 in weight.shape:
        return jnp.zeros((x.shape[0], *weight.shape[:-1]), x.dtype)
    rows, width = x.shape
    reason = _refusal(implementation or "xla", rows, width, math.prod(weight.shape[:-1]), x.dtype)
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r} cannot run: {reason}")
    return cast(jax.Array, _product(x, weight, live, deterministic, implementation))
