"""Attention over whole sequences, and what is fixed about a layer's attention.

A layer calls `attend(spec, q, k, v, pages)` and gets back the context and the pages, and does not know which of the two it
called: `Dense`, here, looks at whole sequences and has no pages; `Paged`, in `jaxkv.model.segments`, writes the new keys and values
into their slots and reads everything back through block tables.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

import pallas_kernels
from jaxkv.cache.pages import Pages
from jaxkv.ops.numerics import DEFAULT, Numerics
from jaxkv.sharding import over_heads

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
      numerics: in deterministic mode the very computation of `Paged` runs, over pages made of the sequences' own keys and values,
        so that the bits are those of decoding. Otherwise one product per sequence, whose memory grows with seq squared.
      mesh: devices that heads are split over, or None.
    """

    batch: int = dataclasses.field(metadata={"static": True})
    seq: int = dataclasses.field(metadata={"static": True})
    numerics: Numerics = dataclasses.field(default=DEFAULT, metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def live(self) -> None:
        """All tokens are real."""
        return None

    def __call__(
        self,
        spec: AttentionSpec,
        q: Float[Array, "tokens heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        pages: Pages | None,
    ) -> tuple[Float[Array, "tokens heads head_dim"], Pages | None]:
        """The context, in q's shape and dtype; pages pass through."""
        if not self.numerics.deterministic:
            return self._whole(spec, q, k, v), pages
        return over_heads(lambda q, k, v: self._as_pages(spec, q, k, v), self.mesh, (q, k, v), ()), pages

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
        behind = per_seq * PAGE - self.seq

        def cut(x: Array) -> Array:
            x = jnp.pad(x.reshape(self.batch, self.seq, kv_heads, head_dim), ((0, 0), (0, behind), (0, 0), (0, 0)))
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
            implementation=self.numerics.implementation,
            deterministic=True,
        )
        assert isinstance(out, jax.Array)
        return out.reshape(q.shape)


def causal_mask(seq: int, window: int | None) -> Bool[Array, "seq seq"]:
    """True where the query (first axis) sees the key (second axis)."""
    place = jnp.arange(seq, dtype=jnp.int32)
    distance = place[:, None] - place[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
