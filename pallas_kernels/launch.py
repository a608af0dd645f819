"""How one launch of a GPU kernel is cut up, and which keys each of its programs reads: plain JAX, known without Pallas.

One program takes one tile of (query, head of the group) pairs of one row and kv head, and one split of that row's keys:

    grid     (batch * tiles, kv_heads, splits)
    tile     flat index query * q_per_kv + head of the group, cut every `tile_rows`: any group size, no padding per group
    split    keys [s * split_tokens, (s + 1) * split_tokens) at absolute positions; a program without live keys does nothing
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import MOSAIC_BLOCK_TOKENS, MOSAIC_TILE_ROWS, KernelConfig
from pallas_kernels.key_blocks import Problem
from pallas_kernels.options import AttentionOptions


class Launch(NamedTuple):
    """Static sizes of one launch; `rows` = queries * q_per_kv."""

    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    pages_per_seq: int
    tiles: int
    splits: int
    config: KernelConfig
    options: AttentionOptions

    @property
    def q_per_kv(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """(query, head of the group) pairs per row and kv head."""
        return self.queries * self.q_per_kv

    @property
    def padded_dim(self) -> int:
        """head_dim up to the next power of two."""
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def row_tokens(self) -> int:
        """Tokens per row of the pool's view: a whole page, or the part of one that divides the block."""
        return math.gcd(self.page_size, self.config.block_tokens)


def make_launch(problem: Problem, options: AttentionOptions, config: KernelConfig) -> Launch:
    """The sizes of one launch, whose pool `triton_refusal` does not refuse."""
    _, queries, heads, head_dim = problem.q.shape
    num_pages, kv_heads, page_size, _ = problem.k_pages.shape
    width = problem.block_tables.shape[1]
    rows = queries * (heads // kv_heads)
    return Launch(
        queries, heads, kv_heads, head_dim, num_pages, page_size, width,
        tiles=-(-rows // config.tile_rows),
        splits=-(-width * page_size // config.split_tokens),
        config=config, options=options,
    )  # fmt: skip


def block_range(launch: Launch, split: jax.Array, lo: jax.Array, hi: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[] first block and the one behind the last that a program reads, of the keys [lo, hi) its tile sees."""
    per_split, per_block = launch.config.split_tokens, launch.config.block_tokens
    begin = jnp.maximum(split * per_split, lo) // per_block
    return begin, (jnp.minimum((split + 1) * per_split, hi) + per_block - 1) // per_block


def tile_positions(launch: Launch, tile: jax.Array, length: jax.Array, num_queries: jax.Array):
    """(query, group head, last, first) i32[tile_rows] of a tile's rows and the scalar key range [lo, hi) any of them sees."""
    rows = launch.config.tile_rows
    flat = tile * rows + lax.iota(jnp.int32, rows)
    query, head = flat // launch.q_per_kv, flat % launch.q_per_kv
    own = length - num_queries + query
    last = jnp.where((query < num_queries) & (query < launch.queries) & (own >= 0) & (own < length), own, -1)
    window = launch.options.sliding_window
    first = jnp.zeros_like(last) if window is None else jnp.maximum(last - (window - 1), 0)
    lowest = tile * rows // launch.q_per_kv
    highest = jnp.minimum((tile * rows + rows - 1) // launch.q_per_kv, jnp.minimum(num_queries, launch.queries) - 1)
    hi = jnp.where(highest >= lowest, length - num_queries + highest + 1, 0)
    lo = jnp.int32(0) if window is None else jnp.maximum(length - num_queries + lowest - (window - 1), 0)
    return query, head, last, first, lo, jnp.minimum(hi, length)


def key_range(launch: Launch, tile: jax.Array, length: jax.Array, num_queries: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i32[] half-open range of keys that any query of one of Mosaic's tiles sees, with scalars only."""
    lowest = tile * MOSAIC_TILE_ROWS // launch.q_per_kv
    last = tile * MOSAIC_TILE_ROWS + MOSAIC_TILE_ROWS - 1
    highest = jnp.minimum(last // launch.q_per_kv, jnp.minimum(num_queries, launch.queries) - 1)
    hi = jnp.where(highest >= lowest, length - num_queries + highest + 1, 0)
    window = launch.options.sliding_window
    lo = jnp.int32(0) if window is None else jnp.maximum(length - num_queries + lowest - (window - 1), 0)
    return lo, jnp.minimum(hi, length)


def ungroup(x: jax.Array, launch: Launch, batch: int) -> jax.Array:
    """[batch * tiles, kv_heads, tile_rows, ...] -> [batch, queries, heads, ...], the padding rows cut off."""
    tail = x.shape[3:]
    x = x.reshape(batch, launch.tiles, launch.kv_heads, launch.config.tile_rows, *tail)
    x = jnp.moveaxis(x, 2, 1).reshape(batch, launch.kv_heads, launch.tiles * launch.config.tile_rows, *tail)
    x = x[:, :, : launch.rows].reshape(batch, launch.kv_heads, launch.queries, launch.q_per_kv, *tail)
    return jnp.moveaxis(x, 2, 1).reshape(batch, launch.queries, launch.heads, *tail)


def block_part(launch: Launch, block, i: int, lo, hi):
    """Part `i` of one of Mosaic's blocks, a page or a piece of one: (first position, column of the table, whether any key is seen)."""
    part = min(launch.page_size, MOSAIC_BLOCK_TOKENS)
    start = block * MOSAIC_BLOCK_TOKENS + i * part
    column = jnp.minimum(start // launch.page_size, launch.pages_per_seq - 1)
    return start, column, (start < hi) & (start + part > lo)
