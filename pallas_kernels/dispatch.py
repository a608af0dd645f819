"""An operation that chooses its implementation when it is lowered, by the platform it is lowered for.

The process's default backend says nothing about that: a program may be compiled for a GPU on a machine without one, or exported for
several platforms at once. `lax.platform_dependent` decides at lowering too, but traces the branches of every platform in every program.
A primitive with one lowering rule a platform traces what is lowered, and imports only that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.gpu import lowering_context

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms with a lowering rule of their own; all others share one and are called "other"."""


class Place(NamedTuple):
    """Where a program is lowered for.

    Attributes:
      platform: one of PLATFORMS or "other".
      divided: XLA divides the program's arrays over several devices, and does not tell how. A call of foreign code would make it gather
        every operand on every device, silently. Inside `jax.shard_map` over all axes the arrays are one device's own: not divided.
      exported: it is lowered by `jax.export`, to run where this process's foreign code may not be.
    """

    platform: str
    divided: bool = False
    exported: bool = False


def _divided(axes: Any) -> bool:
    """Whether XLA divides arrays in a program that is lowered in jax's axis context."""
    if hasattr(axes, "num_devices"):
        return axes.num_devices > 1
    return hasattr(axes, "mesh") and math.prod(n for axis, n in axes.mesh.shape.items() if axis not in axes.manual_axes) > 1


def _result_types(arguments: Sequence[ShapedArray], results: Sequence[jax.ShapeDtypeStruct]) -> list:
    """The results as abstract values on the arguments' mesh, varying over every manual mesh axis that an argument varies over.

    A result whose `sharding` is set keeps its PartitionSpec; the others are not divided over explicit mesh axes.
    """
    meshes = [a.sharding.mesh for a in arguments if not a.sharding.mesh.empty]
    if not meshes:
        return [ShapedArray(r.shape, r.dtype) for r in results]
    one, *others = (a.manual_axis_type for a in arguments)
    axes = one if all(other == one for other in others) else type(one)(varying=one.varying.union(*(o.varying for o in others)))
    specs = [getattr(r.sharding, "spec", None) or PartitionSpec(*[None] * len(r.shape)) for r in results]
    return [
        ShapedArray(r.shape, r.dtype, sharding=NamedSharding(meshes[0], spec), manual_axis_type=axes)
        for r, spec in zip(results, specs)
    ]


def _rule(run: Callable, platform: str) -> Callable:
    """The lowering rule of one platform.

    Inside it no array varies over manual mesh axes: the operation's result says what does, and `run` need not mark its constants.
    """

    @functools.cache
    def lower(place: Place) -> Callable:
        return mlir.lower_fun(functools.partial(run, place))

    def rule(context, *arrays, **static):
        module = context.module_context
        place = Place(platform, _divided(module.axis_context), module.lowering_parameters.for_export)
        local = [a.update(manual_axis_type=type(a.manual_axis_type)()) for a in context.avals_in]
        with lowering_context(platform):
            return lower(place)(context.replace(avals_in=local), *arrays, **static)

    return rule


def make_operation(name: str, *, run: Callable, results: Callable, batch: Callable) -> Callable[..., list[jax.Array]]:
    """A function of arrays and static keywords, usable wherever jax's own are: eagerly, under jit, vmap, checkpoint, loops and shard_map.

    It has no derivative: wrap it in `jax.custom_jvp` or `jax.custom_vjp`.

    Args:
      name: of the primitive, as jaxprs show it.
      run: (place, *arrays, **static) -> sequence of arrays, traced once the `Place` is known that it is lowered for. May raise
        NotImplementedError, which reaches the caller before anything is executed.
      results: (*types, **static) -> sequence of jax.ShapeDtypeStruct, from those of the arrays.
      batch: (operation, size, arrays, batched, **static) -> sequence of arrays, the rule of `jax.vmap`: the arrays whose `batched` is true,
        and all results, carry an axis of `size` in front.

    Returns:
      The function; its static keywords must be hashable.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def compiled(static: tuple) -> Callable:
        return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(static)))

    def batching_rule(arrays, axes, **static):
        size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
        moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes)]
        out = batch(primitive.bind, size, moved, [axis is not None for axis in axes], **static)
        return out, [0] * len(out)

    primitive.def_impl(lambda *arrays, **static: compiled(tuple(static.items()))(*arrays))
    types = lambda arrays: (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    primitive.def_abstract_eval(lambda *arrays, **static: _result_types(arrays, results(*types(arrays), **static)))
    batching.primitive_batchers[primitive] = batching_rule
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, _rule(run, platform), platform=platform)
    mlir.register_lowering(primitive, _rule(run, "other"))
    return primitive.bind


def one_by_one(operation: Callable, arrays: Sequence[jax.Array], batched: Sequence[bool], **static) -> list[jax.Array]:
    """The batch rule of what cannot be folded into one call: the operation for one element of the batch after the other."""

    def call(chosen: list[jax.Array]) -> list[jax.Array]:
        given = iter(chosen)
        return operation(*(next(given) if moved else x for x, moved in zip(arrays, batched)), **static)

    return lax.map(call, [x for x, moved in zip(arrays, batched) if moved])


def broadcast(size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> list[jax.Array]:
    """The arrays with the axis of the batch in front, repeated where they had none."""
    return [x if moved else jnp.broadcast_to(x[None], (size, *x.shape)) for x, moved in zip(arrays, batched)]
