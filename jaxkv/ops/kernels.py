"""Which implementation of attention, page writing and products runs on this machine, and why not the native one."""

import dataclasses

import jax

from pallas_kernels.cpu import library
from pallas_kernels.gpu import own_capability


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What runs where no implementation is named; `str` of it is a few words.

    Args:
      platform: jax's default backend.
      implementation: "cpu" (the native kernels), "triton" (attention and page writing on an NVIDIA GPU) or "xla".
      target: kind of processor that the native kernels run for, such as "avx2"; None with other implementations.
      targets: all that this processor can act as; the environment variable JAXKV_CPU_TARGET names another.
      reason: why it is not the native kernels; None where it is.
    """

    platform: str
    implementation: str
    target: str | None
    targets: tuple[str, ...]
    reason: str | None

    def __str__(self) -> str:
        return self.implementation if self.target is None else f"{self.implementation} ({self.target})"


def kernels() -> Kernels:
    """Which implementation runs on jax's default backend; see `pallas_kernels.paged_attention` and `product`.

    A package that was installed without a C++ compiler has no native kernels, and pip does not say so: this does.

    Returns:
      A value to read or print; it starts the backend, as any use of jax does.

    Raises:
      ValueError: JAXKV_CPU_TARGET names no kind of processor that this one can act as.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        implementation = "triton" if platform == "gpu" and own_capability() else "xla"
        return Kernels(
            platform, implementation, None, (), f"the native kernels are for CPUs, jax's default backend is {platform!r}"
        )
    loaded = library.load()
    if isinstance(loaded, str):
        return Kernels(platform, "xla", None, (), loaded)
    return Kernels(platform, "cpu", loaded.target, loaded.targets, None)
