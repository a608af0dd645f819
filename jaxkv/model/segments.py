"""Attention through pages: which rows the new tokens of a step belong to, where they are written, and what they see.

The flat tokens of a step are rectangles one after the other, each a `Segment`: so many rows of the tables, so many tokens of each.

    tokens    [ row 0 | row 1 | row 2 | row 3 ][ row 2 . . . . | row 3 . . . . ]
    segments  4 rows of 1 token                 2 rows of 5 tokens

Prefill and decode are one path: a prompt's tokens, too, attend through pages.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from jaxkv.cache.pages import Pages
from jaxkv.cache.tables import Tables
from jaxkv.model.attend import AttentionSpec
from jaxkv.ops.numerics import Numerics
from jaxkv.sharding import over_heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A rectangle of new tokens, some rows times `queries` of them, that attend through the rows' block tables.

    Attributes:
      rows: i32[rows], which rows of the tables they are, or None for all of them in order.
      lengths: i32[rows], tokens valid per row, the segment's own included.
      num_queries: i32[rows], how many of the row's `queries` tokens are real: the first ones. The others are written to the null page
        and their results mean nothing.
      queries: width of the rectangle.
    """

    rows: Int[Array, " rows"] | None
    lengths: Int[Array, " rows"]
    num_queries: Int[Array, " rows"]
    queries: int = dataclasses.field(metadata={"static": True})

    @property
    def num_tokens(self) -> int:
        """Tokens of the rectangle, real or not."""
        return self.lengths.shape[0] * self.queries

    def positions(self) -> Int[Array, "rows queries"]:
        """Absolute position of every token, real or not."""
        first = self.lengths - self.num_queries
        return first[:, None] + jnp.arange(self.queries, dtype=jnp.int32)[None, :]

    def slots(self, tables: Tables) -> tuple[Array, Array]:
        """Page and offset in it where each token's key and value go, i32[rows, queries] both."""
        page, offset = tables.slots(self.rows, self.positions())
        return jnp.where(self.real(), page, 0), offset

    def real(self) -> Bool[Array, "rows queries"]:
        """Which tokens of the rectangle are real."""
        return jnp.arange(self.queries, dtype=jnp.int32)[None, :] < self.num_queries[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Attention through pages, for the flat tokens of some segments.

    Attributes:
      segments: what stands where in the flat tokens.
      block_tables: i32[rows, pages_per_seq] of each segment.
      pages, offsets: i32[tokens], where each new key and value is written.
      live: bool[tokens], which tokens are real: nothing needs the results of the others.
      numerics: how attention, and everything that goes with it, is computed.
      mesh: devices that heads and pages are split over, or None.
    """

    segments: tuple[Segment, ...]
    block_tables: tuple[Int[Array, "_ pages_per_seq"], ...]
    pages: Int[Array, " tokens"]
    offsets: Int[Array, " tokens"]
    live: Bool[Array, " tokens"]
    numerics: Numerics = dataclasses.field(metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def over(cls, segments: tuple[Segment, ...], tables: Tables, numerics: Numerics, mesh: Mesh | None) -> "Paged":
        """Work out once per step, for all layers, where its tokens go."""
        slots = [s.slots(tables) for s in segments]
        pages, offsets = (jnp.concatenate([s[i].reshape(-1) for s in slots]) for i in (0, 1))
        live = jnp.concatenate([s.real().reshape(-1) for s in segments])
        return cls(segments, tuple(tables.of(s.rows) for s in segments), pages, offsets, live, numerics, mesh)

    def positions(self) -> Int[Array, " tokens"]:
        """Absolute position of every token; never negative."""
        return jnp.maximum(jnp.concatenate([s.positions().reshape(-1) for s in self.segments]), 0)

    def __call__(
        self,
        spec: AttentionSpec,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        pages: Pages,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Pages]:
        """Write k and v, then attend; returns the context in q's dtype and the pages with them in."""
        local = lambda q, k, v, pages, self: self._on_these_heads(spec, q, k, v, pages)
        return over_heads(local, self.mesh, (q, k, v, pages), (self,))

    def _on_these_heads(self, spec: AttentionSpec, q: Array, k: Array, v: Array, pages: Pages) -> tuple[Array, Pages]:
        """`__call__` over the heads that one device holds."""
        dtype = q.dtype if pages.quantized else pages.k.dtype
        with jax.named_scope("write_pages"):
            k, v = k.astype(dtype), v.astype(dtype)
            written = pallas_kernels.write_pages(
                pages.k,
                pages.v,
                k,
                v,
                self.pages,
                self.offsets,
                k_scales=pages.k_scales,
                v_scales=pages.v_scales,
                implementation=self.numerics.implementation,
            )
            pages = Pages(*written)
        parts, start = [], 0
        for segment, block_tables in zip(self.segments, self.block_tables):
            stop = start + segment.num_tokens
            part = pallas_kernels.paged_attention(
                q[start:stop].reshape(-1, segment.queries, *q.shape[1:]).astype(dtype),
                pages.k,
                pages.v,
                block_tables,
                segment.lengths,
                num_queries=segment.num_queries,
                scale=spec.scale,
                sliding_window=spec.window,
                logits_soft_cap=spec.soft_cap,
                k_scales=pages.k_scales,
                v_scales=pages.v_scales,
                implementation=self.numerics.implementation,
                deterministic=self.numerics.deterministic,
            )
            assert isinstance(part, jax.Array)
            parts.append(part.reshape(stop - start, *q.shape[1:]).astype(q.dtype))
            start = stop
        return jnp.concatenate(parts), pages
