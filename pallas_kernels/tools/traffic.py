"""Which slots the kernels read, from their own loop bounds: what the bytes of a launch are counted with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention_mosaic import BLOCK_TOKENS, block_part, key_range
from pallas_kernels.paged_attention_triton import Plan, block_range, tile_positions


def slot_reads(plan: Plan, lengths: np.ndarray, num_queries: np.ndarray) -> np.ndarray:
    """How often the launch loads each position of each row, for one kv head.

    It runs the functions that the kernel runs (`tile_positions`, `block_range`) for every program of the grid, and applies the
    mask of the kernel's loads.

    Args:
      plan: of the launch.
      lengths, num_queries: i32[batch].

    Returns:
      i64[batch, pages_per_seq * page_size].
    """
    reads = np.zeros((len(lengths), plan.pages_per_seq * plan.page_size), np.int64)
    for row, (length, count) in enumerate(zip(lengths, num_queries)):
        for tile in range(plan.tiles):
            *_, lo, hi = tile_positions(plan, jnp.int32(tile), jnp.int32(length), jnp.int32(count))
            for split in range(plan.splits):
                begin, end = (int(x) for x in block_range(plan, jnp.int32(split), lo, hi))
                first, behind = begin * plan.config.block_tokens, end * plan.config.block_tokens
                reads[row, max(first, int(lo)) : min(behind, int(hi))] += 1
    return reads


def bytes_read(plan: Plan, lengths: np.ndarray, num_queries: np.ndarray, itemsize: int) -> int:
    """Bytes of K and V pages that the launch loads, all kv heads; scales, tables and queries not counted."""
    slots = int(slot_reads(plan, lengths, num_queries).sum())
    return 2 * slots * plan.kv_heads * plan.head_dim * itemsize


def mosaic_slot_reads(plan: Plan, lengths: np.ndarray, num_queries: np.ndarray) -> tuple[np.ndarray, int]:
    """What a launch of the Mosaic kernel copies, which takes whole pages, for one kv head.

    Like `slot_reads`, from the functions that the kernel runs (`key_range`, `block_range`, `block_part`).

    Args:
      plan: of the launch.
      lengths, num_queries: i32[batch].

    Returns:
      i64[batch, pages_per_seq * page_size], how often each position is copied, and how many slots of the null page are: those
      that fill up a block.
    """
    reads, null = np.zeros((len(lengths), plan.pages_per_seq * plan.page_size), np.int64), 0
    part = min(plan.page_size, BLOCK_TOKENS)
    for row, (length, count) in enumerate(zip(lengths, num_queries)):
        for tile in range(plan.tiles):
            lo, hi = key_range(plan, jnp.int32(tile), jnp.int32(length), jnp.int32(count))
            for split in range(plan.splits):
                begin, end = (int(x) for x in block_range(plan, jnp.int32(split), lo, hi))
                for block in range(begin, end):
                    for i in range(BLOCK_TOKENS // part):
                        start, _, seen = block_part(plan, jnp.int32(block), i, lo, hi)
                        if seen:
                            reads[row, int(start) : int(start) + part] += 1
                        else:
                            null += part
    return reads, null
