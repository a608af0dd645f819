"""Which implementation runs: the best one of the platform, or the one asked for by name, or an error that says why not."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.config import generation_of, kernel_config
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import IMPLEMENTATIONS, AttentionOptions
from pallas_kernels.paged_attention_mosaic import mosaic_config, mosaic_refusal, paged_attention_mosaic
from pallas_kernels.paged_attention_triton import paged_attention_triton
from pallas_kernels.paged_attention_xla import paged_attention_xla

# The interpreter of Mosaic knows copies with a barrier only, as from sm_90 on.
_INTERPRETED_GENERATION = "sm_90"


def _refusal(
    name: str, shape: tuple[int, ...], page_dtype: jax.typing.DTypeLike, platform: str, capability: str | None
) -> str | None:
    """Why the implementation cannot run on pages of this shape and dtype, or None."""
    if name in ("triton", "mosaic"):
        if platform not in ("gpu", "cuda"):
            return f"it needs an NVIDIA GPU and the default platform is {platform!r}; '{name}_interpret' runs anywhere"
        if capability is None:
            return "the GPU has no CUDA compute capability"
        if name == "triton" and jnp.dtype(page_dtype).name == "float8_e4m3fn" and generation_of(capability) == "sm_80":
            return f"float8_e4m3fn pages need compute capability 9.0, this GPU has {capability}; use float8_e5m2 or int8"
    if name.startswith("mosaic"):
        generation = generation_of(capability) if name == "mosaic" and capability is not None else None
        return mosaic_refusal(shape[3], shape[2], page_dtype, generation)
    return None


def _device() -> tuple[str, str | None]:
    """(platform, compute capability or None) of the device that jitted code runs on by default."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device if hasattr(jax.sharding, "get_abstract_mesh") else None
    if abstract is not None and abstract.platform in ("gpu", "cuda"):
        return "gpu", getattr(abstract, "compute_capability", None)
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda"):
        return platform, None
    return platform, getattr(jax.devices()[0], "compute_capability", None)


def choose_implementation(implementation: str | None, shape: tuple[int, ...], page_dtype: jax.typing.DTypeLike) -> str:
    """The name of the implementation that will run on the default platform.

    Args:
      implementation: a name, or None for the best: "triton" on an NVIDIA GPU that can run it, "xla" elsewhere.
      shape, page_dtype: of the pages.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation cannot run here.
    """
    platform, capability = _device()
    if implementation is None:
        return "xla" if _refusal("triton", shape, page_dtype, platform, capability) else "triton"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    reason = _refusal(implementation, shape, page_dtype, platform, capability)
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r} cannot run: {reason}")
    return implementation


def run_implementation(problem: Problem, options: AttentionOptions, implementation: str) -> tuple[jax.Array, jax.Array]:
    """(out [batch, queries, heads, head_dim] in q.dtype, lse f32[batch, queries, heads]) by the implementation chosen."""
    if implementation == "xla":
        return paged_attention_xla(problem, options)
    interpret = implementation.endswith("_interpret")
    _, capability = _device()
    generation = _INTERPRETED_GENERATION if interpret or capability is None else generation_of(capability)
    if implementation.startswith("mosaic"):
        return paged_attention_mosaic(problem, options, mosaic_config(generation), interpret=interpret)
    _, queries, heads, head_dim = problem.q.shape
    config = kernel_config(
        generation,
        head_dim=head_dim,
        page_dtype=problem.k_pages.dtype,
        rows=queries * (heads // problem.k_pages.shape[1]),
        deterministic=options.deterministic,
    )
    return paged_attention_triton(problem, options, config, interpret=interpret)
