"""Which GPU a program is lowered for: the one that the mesh in use names, else this process's, else none that is known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.config import generation_of

OLDEST_CAPABILITY, OLDEST_KIND = "8.0", "NVIDIA A100-SXM4-80GB"
"""Taken where no GPU is known, such as for export on a machine without one: what is made for it runs on later ones."""


@functools.cache
def gpu_mesh(kind: str, capability: str) -> AbstractMesh:
    """The mesh to trace and lower under for a GPU that is not there: it tells us, and from jax 0.11 on Pallas, what that can do.

    Args:
      kind: device kind, as the driver reports it.
      capability: compute capability, such as "9.0".
    """

    @dataclasses.dataclass(frozen=True)
    class Device(AbstractDevice):
        compute_capability: str = capability

    device = Device(device_kind=kind, num_cores=None, platform="cuda")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def named_capability() -> str | None:
    """The compute capability of the GPU that the mesh in use names, or None."""
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "compute_capability", None)


def own_capability() -> str | None:
    """The compute capability of this process's first NVIDIA GPU, or None."""
    try:
        return getattr(jax.devices("cuda")[0], "compute_capability", None)
    except RuntimeError:  # no such platform in this process
        return None


def gpu_generation(capability: str | None) -> str:
    """The generation that is lowered for: of the capability named, else of this process's GPU, else the oldest.

    Raises:
      NotImplementedError: the GPU is older than the kernels' oldest.
    """
    return generation_of(capability or own_capability() or OLDEST_CAPABILITY)


def lowering_context(platform: str) -> contextlib.AbstractContextManager:
    """What a platform's rule is lowered in: from jax 0.11 on Pallas lowers for a GPU that is known only, so where none is, the oldest."""
    known = platform != "cuda" or jax.__version_info__ < (0, 11) or named_capability() or own_capability()
    return contextlib.nullcontext() if known else jax.sharding.use_abstract_mesh(gpu_mesh(OLDEST_KIND, OLDEST_CAPABILITY))
