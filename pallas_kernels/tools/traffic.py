"""Which slots the kernels read, from their own loop bounds: what the bytes of a launch are counted with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.config import MOSAIC_BLOCK_TOKENS as BLOCK_TOKENS
from pallas_kernels.launch import Launch, block_part, block_range, key_range, tile_positions


def slot_reads(launch: Launch, lengths: np.ndarray, num_queries: np.ndarray) -> np.ndarray:
    """How often the launch loads each position of each row, for one kv head.

    It runs the functions that the kernel runs (`tile_positions`, `block_range`) for every program of the grid, and applies the
    mask of the kernel's loads.

    Args:
      launch: its sizes.
      lengths, num_queries: i32[batch].

    Returns:
      i64[batch, pages_per_seq * page_size].
    """
    reads = np.zeros((len(lengths), launch.pages_per_seq * launch.page_size), np.int64)
    for row, (length, count) in enumerate(zip(lengths, num_queries)):
        for tile in range(launch.tiles):
            *_, lo, hi = tile_positions(launch, jnp.int32(tile), jnp.int32(length), jnp.int32(count))
            for split in range(launch.splits):
                begin, end = (int(x) for x in block_range(launch, jnp.int32(split), lo, hi))
                first, behind = begin * launch.config.block_tokens, end * launch.config.block_tokens
                reads[row, max(first, int(lo)) : min(behind, int(hi))] += 1
    return reads


def bytes_read(launch: Launch, lengths: np.ndarray, num_queries: np.ndarray, itemsize: int) -> int:
    """Bytes of K and V pages that the launch loads, all kv heads; scales, tables and queries not counted."""
    slots = int(slot_reads(launch, lengths, num_queries).sum())
    return 2 * slots * launch.kv_heads * launch.head_dim * itemsize


def mosaic_slot_reads(launch: Launch, lengths: np.ndarray, num_queries: np.ndarray) -> tuple[np.ndarray, int]:
    """What a launch of the Mosaic kernel copies, which takes whole pages, for one kv head.

    Like `slot_reads`, from the functions that the kernel runs (`key_range`, `block_range`, `block_part`).

    Args:
      launch: its sizes.
      lengths, num_queries: i32[batch].

    Returns:
      i64[batch, pages_per_seq * page_size], how often each position is copied, and how many slots of the null page are: those
      that fill up a block.
    """
    reads, null = np.zeros((len(lengths), launch.pages_per_seq * launch.page_size), np.int64), 0
    part = min(launch.page_size, BLOCK_TOKENS)
    for row, (length, count) in enumerate(zip(lengths, num_queries)):
        for tile in range(launch.tiles):
            lo, hi = key_range(launch, jnp.int32(tile), jnp.int32(length), jnp.int32(count))
            for split in range(launch.splits):
                begin, end = (int(x) for x in block_range(launch, jnp.int32(split), lo, hi))
                for block in range(begin, end):
                    for i in range(BLOCK_TOKENS // part):
                        start, _, seen = block_part(launch, jnp.int32(block), i, lo, hi)
                        if seen:
                            reads[row, int(start) : int(start) + part] += 1
                        else:
                            null += part
    return reads, null
