"""Where each parameter lives on a mesh: heads and the MLP's inner width are split over the axis "tensor".

    parameter                                      split
    attention.qkv   [kv_heads, q_per_kv + 2, ...]    axis 0
    attention.out   [hidden, heads * head_dim]       axis 1 (heads stand in the order of their kv heads)
    mlp.up          [(2,) intermediate, hidden]      the intermediate axis
    mlp.down        [hidden, intermediate]           axis 1
    everything else                                  on every device

So each half of a layer needs one sum over devices, at its end.
"""

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxkv.config import ModelConfig

AXIS = "tensor"


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
    return PartitionSpec()


def sharding_of(config: ModelConfig, parameter: str, mesh: Mesh | AbstractMesh | None) -> NamedSharding | None:
    """A parameter's sharding on a mesh, None without one.

    Raises:
      ValueError: the mesh has no axis "tensor", or its devices do not divide the kv heads.
    """
    if mesh is None:
        return None
    if AXIS not in mesh.shape:
        raise ValueError(f"the mesh needs an axis {AXIS!r}, got {tuple(mesh.shape)}")
    devices = mesh.shape[AXIS]
    if config.num_kv_heads % devices:
        raise ValueError(f"{config.num_kv_heads} kv heads cannot be split over {devices} devices (mesh axis {AXIS!r})")
    return NamedSharding(mesh, partition_of(config, parameter, devices))
