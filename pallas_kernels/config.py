"""How the kernels are cut up, per GPU generation: frozen, validated, one table.

Nothing here changes what is computed, but `block_tokens` and `split_tokens` fix where sums are cut, and so the last bits.
The numbers come from the compiler's report (registers, spills, shared memory); no GPU has timed them yet.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

GENERATIONS = ("sm_80", "sm_90", "sm_100")


def _is_power_of_two(x: int) -> bool:
    return isinstance(x, int) and x > 0 and x & (x - 1) == 0


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tile sizes of one kernel launch.

    Args:
      generation: one of GENERATIONS.
      block_tokens: keys per step of the loop, a power of two in [16, 256].
      split_tokens: keys per program, at absolute positions; a multiple of block_tokens.
      tile_rows: (query, head of the group) pairs per program, a power of two in [16, 128].
      num_warps: 1, 2, 4 or 8.
      num_stages: copies in flight, 1 to 8.

    Raises:
      ValueError: a value is out of its range.
    """

    generation: str
    block_tokens: int
    split_tokens: int
    tile_rows: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.generation not in GENERATIONS:
            raise ValueError(f"generation must be one of {GENERATIONS}, got {self.generation!r}")
        if not (_is_power_of_two(self.block_tokens) and 16 <= self.block_tokens <= 256):
            raise ValueError(f"block_tokens must be a power of two in [16, 256], got {self.block_tokens!r}")
        if not (isinstance(self.split_tokens, int) and self.split_tokens > 0) or self.split_tokens % self.block_tokens:
            raise ValueError(f"split_tokens must be a multiple of block_tokens, got {self.split_tokens!r}")
        if not (_is_power_of_two(self.tile_rows) and 16 <= self.tile_rows <= 128):
            raise ValueError(f"tile_rows must be a power of two in [16, 128], got {self.tile_rows!r}")
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps must be 1, 2, 4 or 8, got {self.num_warps!r}")
        if not (isinstance(self.num_stages, int) and 1 <= self.num_stages <= 8):
            raise ValueError(f"num_stages must be in [1, 8], got {self.num_stages!r}")


def generation_of(compute_capability: str | float) -> str:
    """The generation whose configuration a GPU takes: "8.6" -> "sm_80", "9.0" -> "sm_90", "12.0" -> "sm_100".

    Raises:
      NotImplementedError: older than 8.0.
    """
    major = int(float(compute_capability))
    if major < 8:
        raise NotImplementedError(f"the kernels need compute capability 8.0 or later, got {compute_capability}")
    return "sm_80" if major == 8 else "sm_90" if major == 9 else "sm_100"


def kernel_config(
    generation: str, *, head_dim: int, page_dtype: DTypeLike, rows: int, deterministic: bool = False
) -> KernelConfig:
    """The configuration of the Triton kernel for one shape.

    Args:
      generation: one of GENERATIONS.
      head_dim: features per head, before padding.
      page_dtype: dtype of the pages.
      rows: queries * q_per_kv of the call.
      deterministic: one tile size for any number of rows.
    """
    if jnp.dtype(page_dtype).itemsize == 4:
        return KernelConfig(generation, block_tokens=32, split_tokens=1024, tile_rows=16, num_warps=8, num_stages=1)
    # Converting one-byte pages takes more registers than two blocks leave each other (docs/measurements.md, "Registers of one-byte pages").
    converting = generation == "sm_80" and jnp.dtype(page_dtype).itemsize == 1 and head_dim > 64
    largest = 16 if deterministic else 32 if head_dim > 128 or converting else 64
    tile = min(largest, max(16, 1 << (rows - 1).bit_length()))
    return KernelConfig(
        generation,
        block_tokens=64 if head_dim <= 64 and tile == 16 else 32,
        split_tokens=1024,
        tile_rows=tile,
        num_warps=4 if head_dim <= 128 and tile == 16 else 8,
        num_stages=3 if head_dim > 128 else 4,
    )


MOSAIC_BLOCK_TOKENS, MOSAIC_TILE_ROWS, MOSAIC_STAGES = 32, 16, 2


def mosaic_config(generation: str) -> KernelConfig:
    """The one configuration of the Mosaic kernel: 32 keys per step, 1024 per split, 16 rows, one warpgroup, two stages."""
    return KernelConfig(generation, MOSAIC_BLOCK_TOKENS, 1024, MOSAIC_TILE_ROWS, num_warps=4, num_stages=MOSAIC_STAGES)
