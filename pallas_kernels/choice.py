"""Which implementation of attention and of page writing runs: the best, the one asked for by name, or an error that says why not."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.config import MOSAIC_BLOCK_TOKENS, generation_of
from pallas_kernels.cpu import library
from pallas_kernels.dispatch import Place
from pallas_kernels.gpu import gpu_generation, named_capability
from pallas_kernels.options import IMPLEMENTATIONS, INT32_MAX

GPU_KERNELS = ("triton", "mosaic")
INTERPRETED_GENERATION = "sm_90"
"""The interpreter of Mosaic knows copies with a barrier only, as from sm_90 on."""


def mosaic_refusal(
    head_dim: int, page_size: int, page_dtype: jax.typing.DTypeLike, generation: str | None = None
) -> str | None:
    """Why the Mosaic kernel cannot take this call on a GPU of `generation` (None: on any), or None."""
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11 or later (plgpu.mma), this is {jax.__version__}"
    if jnp.dtype(page_dtype).name not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16 pages, got {jnp.dtype(page_dtype).name}; use 'triton'"
    if head_dim % 32 or head_dim > 256:
        return f"it takes head_dim in multiples of 32 up to 256, got {head_dim}; use 'triton'"
    if page_size < 8 or (MOSAIC_BLOCK_TOKENS % page_size and page_size % MOSAIC_BLOCK_TOKENS):
        return f"it takes page sizes 8, 16 and multiples of {MOSAIC_BLOCK_TOKENS}, got {page_size}; use 'triton'"
    if generation == "sm_80" and page_size == 8 and head_dim % 64:  # one cp.async fills four tiles of 8 x 16
        return f"with compute capability 8.x it takes pages of 8 tokens for multiples of 64 in head_dim, got {head_dim}; use 'triton'"
    return None


def triton_refusal(shape: tuple[int, ...], page_dtype: jax.typing.DTypeLike, generation: str | None = None) -> str | None:
    """Why the Triton kernels cannot take pages of this shape and dtype on a GPU of `generation` (None: on any), or None.

    The backend takes 64-bit offsets for arrays of more than 2**32 bytes only, and offsets count elements and are signed: an array of
    one-byte elements between the two limits would wrap. (lowering.py of jax, `_compute_offsets_from_indices`.)
    """
    elements, dtype = math.prod(shape), jnp.dtype(page_dtype)
    if generation == "sm_80" and dtype.name == "float8_e4m3fn":
        return "float8_e4m3fn pages need compute capability 9.0, this GPU has 8.x; use float8_e5m2 or int8"
    if elements - 1 > INT32_MAX and elements * dtype.itemsize <= 2**32:
        return (
            f"pages {tuple(shape)} have {elements} elements of {dtype.itemsize} byte: offsets would overflow int32 in the Triton "
            "backend; make the pool smaller than 2**31 elements or larger than 2**32 bytes, or use implementation='xla'"
        )
    return None


def refusal(
    name: str, shape: tuple[int, ...], page_dtype: jax.typing.DTypeLike, generation: str | None = None, writing: bool = False
) -> str | None:
    """Why the implementation cannot take pages of this shape and dtype on a GPU of `generation` (None: on any), or None.

    `writing` is of pages, which "mosaic" leaves to Triton's writer.
    """
    if name.startswith("mosaic") and not writing:
        return mosaic_refusal(shape[3], shape[2], page_dtype, generation)
    return None if name in ("xla", "cpu") else triton_refusal(shape, page_dtype, generation)


def refuse(name: str, reason: str | None) -> None:
    """Raises NotImplementedError if there is a reason why the implementation cannot run."""
    if reason is not None:
        raise NotImplementedError(f"implementation {name!r} cannot run: {reason}")


def check_name(
    implementation: str | None, shape: tuple[int, ...], page_dtype: jax.typing.DTypeLike, *, writing: bool = False
) -> None:
    """What can be said of an implementation when it is asked for, before the platform is known.

    Args:
      implementation: a name, or None for the best.
      shape, page_dtype: of the pages.
      writing: asked for by `write_pages`.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: it cannot take such pages.
    """
    if implementation is None:
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    capability = named_capability()
    generation = None if capability is None or implementation not in GPU_KERNELS else generation_of(capability)
    refuse(implementation, refusal(implementation, shape, page_dtype, generation, writing))


def native_refusal(place: Place) -> str | None:
    """Why the native CPU kernels cannot be in a program that is lowered for this place, or None."""
    if place.platform != "cpu":
        return f"it needs a CPU and the program is lowered for {place.platform!r}"
    if place.divided:
        return (
            "XLA divides the program's arrays over several devices, and would gather all of them on each for a call of native code; "
            "call it inside jax.shard_map over all axes of the mesh"
        )
    if place.exported:
        return "the program is exported, and the native kernels belong to this installation"
    return library.why_not()


def runs_natively(implementation: str | None, place: Place) -> bool:
    """Whether the native CPU kernels run: asked for by name, or the best that there is.

    Raises:
      NotImplementedError: they were asked for by name and cannot run there.
    """
    if implementation == "cpu":
        refuse(implementation, native_refusal(place))
        return True
    return implementation is None and native_refusal(place) is None


def choose(
    implementation: str | None,
    place: Place,
    capability: str | None,
    shape: tuple[int, ...],
    page_dtype: jax.typing.DTypeLike,
    *,
    writing: bool = False,
) -> tuple[str, str]:
    """(name, generation for which a kernel is configured) of what runs on the platform that is lowered for.

    Args:
      implementation: a name, or None for the best: "triton" on an NVIDIA GPU that can run it, "cpu" on a CPU where `native_refusal` has
        nothing against it, "xla" elsewhere.
      place: what is lowered for.
      capability: of `gpu.named_capability` at the call.
      shape, page_dtype: of the pages.
      writing: asked for by `write_pages`.

    Raises:
      NotImplementedError: the named implementation cannot run there.
    """
    if runs_natively(implementation, place):
        return "cpu", INTERPRETED_GENERATION
    if implementation is not None and implementation not in GPU_KERNELS:
        return implementation, INTERPRETED_GENERATION
    if place.platform != "cuda":
        if implementation is None:
            return "xla", INTERPRETED_GENERATION
        where = f"it needs an NVIDIA GPU and the program is lowered for {place.platform!r}"
        refuse(implementation, f"{where}; '{implementation}_interpret' runs anywhere")
    try:
        generation = gpu_generation(capability)
    except NotImplementedError as error:
        if implementation is None:
            return "xla", INTERPRETED_GENERATION
        raise NotImplementedError(f"implementation {implementation!r} cannot run: {error}") from error
    reason = refusal(implementation or "triton", shape, page_dtype, generation, writing)
    if implementation is None:
        return ("triton" if reason is None else "xla"), generation
    refuse(implementation, reason)
    return implementation, generation
