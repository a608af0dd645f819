"""The three GPUs that the kernels are compiled for, and how XLA is told about them on a machine without one.

Limits are those of NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.gpu import gpu_mesh


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU model.

    Attributes:
      arch: as `ptxas -arch` takes it.
      generation: the key of `kernel_config`.
      capability: compute capability.
      kind: device kind, as the driver reports it.
      cores: streaming multiprocessors.
      bandwidth: bytes/s of device memory.
      bf16_flops: dense bfloat16 tensor-core operations/s.
      shared_per_block: most bytes of shared memory one block may ask for.
      shared_per_core: bytes of shared memory per multiprocessor.
      memory, l2: bytes.
      clock_ghz: boost clock.
    """

    arch: str
    generation: str
    capability: str
    kind: str
    cores: int
    bandwidth: float
    bf16_flops: float
    shared_per_block: int
    shared_per_core: int
    memory: int
    l2: int
    clock_ghz: float

    def text_proto(self) -> str:
        """XLA's GpuTargetConfigProto in text form."""
        major, minor = self.capability.split(".")
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_per_core}
  shared_memory_per_block_optin: {self.shared_per_block}
  core_count: {self.cores} fpus_per_core: {64 if major == "8" else 128}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 13 }}
device_description_str: "{self.kind}"
"""


TARGETS = {
    target.arch: target
    for target in (
        Target("sm_80", "sm_80", "8.0", "NVIDIA A100-SXM4-80GB", 108, 2.039e12, 312e12, 166912, 167936, 85 * 10**9, 40 << 20, 1.41),
        Target("sm_90a", "sm_90", "9.0", "NVIDIA H200", 132, 4.8e12, 989e12, 232448, 233472, 141 * 10**9, 50 << 20, 1.98),
        Target("sm_100a", "sm_100", "10.0", "NVIDIA B200", 148, 8.0e12, 2250e12, 232448, 233472, 180 * 10**9, 126 << 20, 1.96),
    )
}  # fmt: skip


def target_sharding(target: Target) -> NamedSharding:
    """The sharding that places an abstract array on one device of the target. Needs the CUDA plugin of jax's version."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target.text_proto(), topology="1x1x1"
    )
    return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())


def target_mesh(target: Target) -> jax.sharding.AbstractMesh:
    """The abstract mesh to trace and lower under."""
    return gpu_mesh(target.kind, target.capability)
