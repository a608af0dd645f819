"""Attention, dense and over pages.

A layer calls `attend(spec, q, k, v, pages)` and gets back the context and the pages, and does not know which of the two it
called: `Dense` looks at whole sequences and has no pages, `Paged` writes the new keys and values into their slots and reads
everything back through block tables. Prefill and decode are one path: a prompt's tokens, too, attend through pages.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from jaxkv.cache.pages import Pages

PAGE = 16
"""Page size of the pages that deterministic `Dense` attention makes for itself; the result does not depend on it."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is fixed about a layer's attention: factor on q.k, sliding window in tokens, soft cap of the scores."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """Causal attention within `batch` whole sequences of `seq` tokens.

    Attributes:
      batch, seq: the flat tokens are `[batch * seq]`.
      deterministic: run the very computation of `Paged`, over pages made of the sequences' own keys and values, so that the
        bits are those of decoding. Otherwise one product per sequence, whose memory grows with seq squared.
      implementation: of the attention kernel, in deterministic mode.
    """

    batch: int = dataclasses.field(metadata={"static": True})
    seq: int = dataclasses.field(metadata={"static": True})
    deterministic: bool = dataclasses.field(default=False, metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(self, spec: AttentionSpec, q: Array, k: Array, v: Array, pages: Pages | None) -> tuple[Array, Pages | None]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] -> context like q; pages pass through."""
        return (self._as_pages if self.deterministic else self._whole)(spec, q, k, v), pages

    def _whole(self, spec: AttentionSpec, q: Array, k: Array, v: Array) -> Array:
        kv_heads, head_dim = k.shape[1:]
        q4 = q.reshape(self.batch, self.seq, kv_heads, -1, head_dim)
        k4, v4 = (x.reshape(self.batch, self.seq, kv_heads, head_dim) for x in (k, v))
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q4, k4, preferred_element_type=jnp.float32) * spec.scale
        if spec.soft_cap is not None:
            scores = jnp.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = jnp.where(causal_mask(self.seq, spec.window)[None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v4).reshape(q.shape)

    def _as_pages(self, spec: AttentionSpec, q: Array, k: Array, v: Array) -> Array:
        kv_heads, head_dim = k.shape[1:]
        per_seq = -(-self.seq // PAGE)

        def cut(x: Array) -> Array:
            x = jnp.pad(
                x.reshape(self.batch, self.seq, kv_heads, head_dim), ((0, 0), (0, per_seq * PAGE - self.seq), (0, 0), (0, 0))
            )
            return x.reshape(self.batch * per_seq, PAGE, kv_heads, head_dim).swapaxes(1, 2)

        tables = jnp.arange(self.batch * per_seq, dtype=jnp.int32).reshape(self.batch, per_seq)
        out = pallas_kernels.paged_attention(
            q.reshape(self.batch, self.seq, *q.shape[1:]),
            cut(k),
            cut(v),
            tables,
            jnp.full(self.batch, self.seq, jnp.int32),
            scale=spec.scale,
            sliding_window=spec.window,
            logits_soft_cap=spec.soft_cap,
            implementation=self.implementation,
            deterministic=True,
        )
        assert isinstance(out, jax.Array)
        return out.reshape(q.shape)


def causal_mask(seq: int, window: int | None) -> Bool[Array, "seq seq"]:
    """True where the query (first axis) sees the key (second axis)."""
    distance = jnp.arange(seq)[:, None] - jnp.arange(seq)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A rectangle of new tokens, `rows` times `queries` of them, that attend through block tables.

    Attributes:
      block_tables: i32[rows, pages_per_seq].
      lengths: i32[rows], tokens valid per row, the new ones included.
      num_queries: i32[rows], how many of the row's `queries` tokens are real: the first ones.
      queries: width of the rectangle.
    """

    block_tables: Int[Array, "rows pages_per_seq"]
    lengths: Int[Array, " rows"]
    num_queries: Int[Array, " rows"]
    queries: int = dataclasses.field(metadata={"static": True})

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    def positions(self) -> Int[Array, "rows queries"]:
        """Absolute position of every token, real or not."""
        first = self.lengths - self.num_queries
        return first[:, None] + jnp.arange(self.queries, dtype=jnp.int32)[None, :]

    def slots(self, page_size: int) -> tuple[Array, Array]:
        """Page and offset in it where each token's key and value go, i32[rows, queries] both; tokens that are not real go
        to the null page."""
        position = self.positions()
        width = self.block_tables.shape[1]
        real = jnp.arange(self.queries, dtype=jnp.int32)[None, :] < self.num_queries[:, None]
        entry = jnp.clip(position // page_size, 0, width - 1)
        page = jnp.take_along_axis(self.block_tables, entry, axis=1)
        return jnp.where(real, page, 0), position % page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Attention through pages; the flat tokens are the segments' rectangles one after the other.

    Attributes:
      segments: what stands where in the flat tokens.
      pages, offsets: i32[tokens], where each new key and value is written.
      implementation: of the kernel, see `pallas_kernels.paged_attention`.
      deterministic: fixed query tiles; a token's bits then do not depend on how many tokens share the step.
    """

    segments: tuple[Segment, ...]
    pages: Int[Array, " tokens"]
    offsets: Int[Array, " tokens"]
    implementation: str | None = dataclasses.field(metadata={"static": True})
    deterministic: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def over(
        cls,
        segments: tuple[Segment, ...],
        page_size: int,
        *,
        implementation: str | None = None,
        deterministic: bool = False,
    ) -> "Paged":
        """Work out once per step where its tokens go."""
        slots = [s.slots(page_size) for s in segments]
        pages, offsets = (jnp.concatenate([s[i].reshape(-1) for s in slots]) for i in (0, 1))
        return cls(segments, pages, offsets, implementation, deterministic)

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
        """Write k and v, then attend, in the pages' dtype; returns the context in q's and the pages with them in."""
        with jax.named_scope("write_pages"):
            k, v = k.astype(pages.k.dtype), v.astype(pages.v.dtype)
            pages = Pages(*pallas_kernels.write_pages(pages.k, pages.v, k, v, self.pages, self.offsets))
        parts, start = [], 0
        for s in self.segments:
            stop = start + s.rows * s.queries
            part = pallas_kernels.paged_attention(
                q[start:stop].reshape(s.rows, s.queries, *q.shape[1:]).astype(pages.k.dtype),
                pages.k,
                pages.v,
                s.block_tables,
                s.lengths,
                num_queries=s.num_queries,
                scale=spec.scale,
                sliding_window=spec.window,
                logits_soft_cap=spec.soft_cap,
                implementation=self.implementation,
                deterministic=self.deterministic,
            )
            assert isinstance(part, jax.Array)
            parts.append(part.reshape(stop - start, *q.shape[1:]).astype(q.dtype))
            start = stop
        return jnp.concatenate(parts), pages
