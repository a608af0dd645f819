"""Pages: the contents of one layer's part of the cache, and the only owner of their layout, dtype, scales and placement.

    k, v                 [num_pages, kv_heads, page_size, head_dim]
    k_scales, v_scales   [num_pages, kv_heads, page_size]             where k and v are quantized: value = stored * scale

Page 0 is the null page: unused table entries and padding point at it, and nothing live is ever in it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxkv.config import QUANTIZED_DTYPES, CacheConfig, ModelConfig
from jaxkv.sharding import pages_sharding
from pallas_kernels.options import bits_of


class Pages(NamedTuple):
    """One layer's pages; see above. `k_scales` and `v_scales` are None unless the pages are quantized."""

    k: Array
    v: Array
    k_scales: Array | None = None
    v_scales: Array | None = None

    @classmethod
    def create(cls, config: ModelConfig, sizes: CacheConfig, mesh: Mesh | None = None) -> "Pages":
        """Empty pages for one layer of a model, split by kv head over the mesh if there is one."""
        shape = (sizes.num_pages, config.num_kv_heads, sizes.page_size, config.head_dim)
        dtype, sharding = sizes.dtype or config.dtype, pages_sharding(config, mesh)

        def empty(shape: tuple[int, ...], dtype: str) -> Array:
            return jnp.zeros(shape, dtype, device=sharding)

        if dtype in QUANTIZED_DTYPES:
            return cls(*(empty(s, d) for s, d in ((shape, dtype),) * 2 + ((shape[:3], "float32"),) * 2))
        return cls(empty(shape, dtype), empty(shape, dtype))

    @property
    def quantized(self) -> bool:
        """Whether values are stored with scales."""
        return self.k_scales is not None

    def with_copies(self, old: Array, new: Array) -> "Pages":
        """Pages `old` written over pages `new`, i32[n] both."""
        return jax.tree.map(lambda x: _copied(x, old, new), self)

    def grown(self, num_pages: int) -> "Pages":
        """The same contents in a larger pool."""
        return jax.tree.map(lambda x: jnp.pad(x, ((0, num_pages - x.shape[0]), *[(0, 0)] * (x.ndim - 1))), self)


def page_bytes(models: Sequence[ModelConfig], page_size: int, dtype: str | None = None) -> int:
    """Bytes of one page in all layers of these models together, scales included.

    Args:
      models: whose keys and values it holds; a model and its draft share the numbers of their pages.
      page_size: tokens a page holds.
      dtype: of keys and values, by default each model's own.
    """
    total = 0
    for config in models:
        kept = dtype or config.dtype
        vector = config.head_dim * jnp.dtype(kept).itemsize + (4 if kept in QUANTIZED_DTYPES else 0)  # and a float32 scale
        total += 2 * config.num_layers * config.num_kv_heads * page_size * vector
    return total


def _copied(x: Array, old: Array, new: Array) -> Array:
    """x[old] written over x[new]. Narrow floats travel as integers, because XLA on CPU turns their scatter into one of float32 and
    converts the whole pool there and back."""
    bits = lax.bitcast_convert_type(x, bits_of(x.dtype))
    return lax.bitcast_convert_type(bits.at[new].set(bits[old]), x.dtype)
