"""Where weights and pages live on a mesh: one table. Heads and the MLP's inner width are split over the axis "tensor".

    what                                                split
    attention.qkv   [kv_heads, q_per_kv + 2, ...]       axis 0
    attention.out   [hidden, heads * head_dim]          axis 1 (heads stand in the order of their kv heads)
    mlp.up          [(2,) intermediate, hidden]         the intermediate axis
    mlp.down        [hidden, intermediate]              axis 1
    pages           [num_pages, kv_heads, ...]          axis 1, scales too
    queries, keys and values of a step                  axis 1: [tokens, heads or kv_heads, head_dim]
    embedding and output matrix                         on every device: a step would gather its logits to choose tokens
    norms, biases of the residual stream, everything else    on every device

So each half of a layer needs one sum over devices, at its end, and attention none: `over_heads` runs it on each device's heads alone.

The compiler carries this table through a step, so the mesh's axes are automatic ones (`jax.sharding.AxisType.Auto`): a mesh with explicit
axes, `jax.make_mesh`'s default, is taken as the same devices with automatic ones, and arrays that a caller has divided over explicit axes
are so on the way in and out again (`on_automatic_axes`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    reshard,
    use_abstract_mesh,
)

from jaxkv.config import ModelConfig, shown

AXIS = "tensor"
BY_HEAD = PartitionSpec(None, AXIS)
"""Of pages and their scales, and of queries, keys and values."""
WHOLE = PartitionSpec()


def automatic(mesh: Any) -> Any:
    """The mesh with automatic axes in place of explicit ones."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        wanted = f'a jax.sharding.Mesh with an axis {AXIS!r}, jax.make_mesh((2,), ("tensor",)), or None'
        raise ValueError(f"mesh must be {wanted}, got {shown(mesh)}")
    types = tuple(AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    return mesh if types == mesh.axis_types else mesh.update(axis_types=types)


def _mesh_of(x: Any) -> AbstractMesh:
    """The mesh in an array's type."""
    return jax.typeof(x).sharding.mesh


def explicit_mesh(*trees: Any) -> AbstractMesh | None:
    """The mesh with explicit axes that is set (`jax.set_mesh`), or that an array is divided over; None where there is none."""
    meshes = (get_abstract_mesh(), *map(_mesh_of, jax.tree.leaves(trees)))
    return next((m for m in meshes if AxisType.Explicit in m.axis_types), None)


def within(f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)` with automatic axes in place of explicit ones; its results are divided as the compiler likes."""
    mesh = explicit_mesh(args)
    if mesh is None:
        return f(*args)
    with use_abstract_mesh(automatic(mesh)):
        return f(*jax.tree.map(lambda x: reshard(x, WHOLE) if _mesh_of(x) == mesh else x, args))


def like(x: Any, given: Any) -> Any:
    """An array out of `within`, divided over explicit axes as `given`, of its shape, is."""
    mesh = _mesh_of(given)
    if AxisType.Explicit not in mesh.axis_types:
        return x
    with use_abstract_mesh(mesh):
        return reshard(x, jax.typeof(given).sharding.spec)


def keeps_axes(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that returns its object changed, whatever the axes of the mesh: every array of it stays divided as it was."""

    @functools.wraps(method)
    def kept(self: Any, *args: Any, **options: Any) -> Any:
        if explicit_mesh(self, args, options) is None:
            return method(self, *args, **options)
        new = within(lambda self, args, options: method(self, *args, **options), self, args, options)
        return jax.tree.map(like, new, self)

    return kept


def on_automatic_axes(f: Callable[..., Any], batch: Any, *args: Any) -> Any:
    """`f(batch, *args)` whatever the axes of the mesh that arrays are divided over.

    Args:
      f: its results have the batch's rows on their first axis, or no axes; they come back divided over explicit axes as the batch is.
      batch: an array of rows.
      args: pytrees of arrays, divided over the mesh in any way.
    """
    return by_rows(within(f, batch, *args), batch, *args)


def by_rows(out: Any, batch: Any, *args: Any) -> Any:
    """What `within` made of a batch and more arguments, its rows divided over explicit axes as the batch's are."""
    mesh = explicit_mesh(batch, args)
    if mesh is None:
        return out
    rows = jax.typeof(batch).sharding.spec[:1] if _mesh_of(batch) == mesh else ()
    with use_abstract_mesh(mesh):
        return jax.tree.map(lambda x: reshard(x, PartitionSpec(*rows) if x.ndim else WHOLE), out)


def partition_of(config: ModelConfig, parameter: str, devices: int) -> PartitionSpec:
    """How a parameter is split over `devices`; an MLP whose inner width they do not divide is kept whole."""
    kind = ".".join(parameter.split(".")[-2:])
    if kind in ("attention.qkv", "attention.qkv_bias"):
        return PartitionSpec(AXIS)
    if kind == "attention.out":
        return PartitionSpec(None, AXIS)
    if config.intermediate_size % devices == 0:
        if kind in ("mlp.up", "mlp.up_bias"):
            return PartitionSpec(None, AXIS) if config.mlp == "gated" else PartitionSpec(AXIS)
        if kind == "mlp.down":
            return PartitionSpec(None, AXIS)
    return WHOLE


def check_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh) -> int:
    """Devices along the axis that heads are split over.

    Raises:
      ValueError: the mesh has no axis "tensor", or its devices do not divide the kv heads.
    """
    if AXIS not in mesh.shape:
        raise ValueError(f"the mesh needs an axis {AXIS!r}, got {tuple(mesh.shape)}")
    devices = mesh.shape[AXIS]
    if config.num_kv_heads % devices:
        raise ValueError(f"{config.num_kv_heads} kv heads cannot be split over {devices} devices (mesh axis {AXIS!r})")
    return devices


def sharding_of(config: ModelConfig, parameter: str, mesh: Mesh | AbstractMesh | None) -> NamedSharding | None:
    """A parameter's sharding on a mesh, None without one.

    Raises:
      ValueError: the mesh does not fit the model; see `check_mesh`.
    """
    if mesh is None:
        return None
    return NamedSharding(automatic(mesh), partition_of(config, parameter, check_mesh(config, mesh)))


def pages_sharding(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> NamedSharding | None:
    """The sharding of a layer's pages on a mesh, None without one.

    Raises:
      ValueError: the mesh does not fit the model; see `check_mesh`.
    """
    if mesh is None:
        return None
    check_mesh(config, mesh)
    return NamedSharding(automatic(mesh), BY_HEAD)


def over_heads(f: Callable[..., Any], mesh: Mesh | None, by_head: tuple, whole: tuple) -> Any:
    """`f(*by_head, *whole)`, on a mesh by each device over its own heads: without this the compiler would gather the pages.

    Args:
      f: takes and returns pytrees whose arrays have heads on axis 1.
      mesh: None runs `f` as it is.
      by_head: pytrees of arrays that are split by head.
      whole: pytrees of arrays that every device reads whole.
    """
    if mesh is None:
        return f(*by_head, *whole)
    specs = (*(BY_HEAD for _ in by_head), *(WHOLE for _ in whole))
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=BY_HEAD, check_vma=False)(*by_head, *whole)
