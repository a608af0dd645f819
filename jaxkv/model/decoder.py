"""The decoder: embed, layers, logits. One module for every family, driven by `ModelConfig`.

It does not know about pages: attention is handed in as a function (see `jaxkv.model.attend`), and the cache's pages pass through.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.cache.pages import Pages
from jaxkv.config import ModelConfig
from jaxkv.model.attend import AttentionSpec, Dense
from jaxkv.model.layers import MLP, Norm, new_param, optional, rotary_tables, rotate, value
from jaxkv.ops.linear import linear

Attend = Callable[[AttentionSpec, Array, Array, Array, Any], tuple[Array, Any]]
"""`Dense` or `Paged`, or another pytree that can be called so."""
Angles = tuple[Array, Array] | None
"""cos and sin of each token's rotary angles, None in a layer without rotation."""


def _norm(config: ModelConfig, kind: str | None = None, size: int | None = None) -> Norm:
    size = config.hidden_size if size is None else size
    return Norm(kind or config.norm, size, eps=config.norm_eps, plus_one=config.norm_plus_one, dtype=config.dtype)


class Attention(nnx.Module):
    """Projections, head norms and rotation around an `Attend`."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs | None):
        c = config
        self.config, self.rope = c, c.layer_rope(layer)
        self.spec = AttentionSpec(c.scale, c.window(layer), c.attn_soft_cap)
        heads = (c.num_kv_heads, c.q_per_kv + 2, c.head_dim)
        self.qkv = new_param(rngs, (*heads, c.hidden_size), c.dtype)
        self.qkv_bias = new_param(rngs, heads, c.dtype, None) if c.qkv_bias else None
        self.out = new_param(rngs, (c.hidden_size, c.num_heads * c.head_dim), c.dtype)
        self.out_bias = new_param(rngs, (c.hidden_size,), c.dtype, None) if c.out_bias else None
        self.q_norm = _norm(c, "rms", c.head_dim) if c.qk_norm else None
        self.k_norm = _norm(c, "rms", c.head_dim) if c.qk_norm else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], angles: Angles, attend: Attend, pages: Pages | None, deterministic: bool
    ) -> tuple[Float[Array, "tokens hidden"], Pages | None]:
        """Attention's contribution to the residual stream, and the pages with the new tokens in."""
        c, tokens = self.config, x.shape[0]
        qkv = linear(x, value(self.qkv), optional(self.qkv_bias), deterministic=deterministic)
        q = qkv[:, :, : c.q_per_kv].reshape(tokens, c.num_heads, c.head_dim)
        k, v = qkv[:, :, c.q_per_kv], qkv[:, :, c.q_per_kv + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q, deterministic=deterministic)
            k = self.k_norm(k, deterministic=deterministic)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        with jax.named_scope("attend"):
            context, pages = attend(self.spec, q, k, v, pages)
        out = linear(context.reshape(tokens, -1), value(self.out), optional(self.out_bias), deterministic=deterministic)
        return out, pages


class Layer(nnx.Module):
    """Attention and MLP, with the norms where `config.block` puts them."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs | None):
        self.config = config
        self.attention, self.mlp = Attention(config, layer, rngs), MLP(config, rngs)
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        sandwich = config.block == "sandwich"
        self.attention_out_norm, self.mlp_out_norm = (_norm(config), _norm(config)) if sandwich else (None, None)

    def __call__(
        self, x: Float[Array, "tokens hidden"], angles: Angles, attend: Attend, pages: Pages | None, deterministic: bool = False
    ) -> tuple[Float[Array, "tokens hidden"], Pages | None]:
        """The residual stream behind the layer, and the pages with the new tokens in."""
        block = self.config.block

        def attention(y: Array) -> tuple[Array, Pages | None]:
            with jax.named_scope("attention"):
                return self.attention(y, angles, attend, pages, deterministic)

        def mlp(y: Array) -> Array:
            with jax.named_scope("mlp"):
                return self.mlp(y, deterministic=deterministic)

        def normed(by: Norm, y: Array) -> Array:
            return by(y, deterministic=deterministic)

        if block == "post":
            y, pages = attention(x)
            x = normed(self.attention_norm, x + y)
            return normed(self.mlp_norm, x + mlp(x)), pages
        y, pages = attention(normed(self.attention_norm, x))
        if block == "parallel":
            return x + y + mlp(normed(self.mlp_norm, x)), pages
        if self.attention_out_norm is None or self.mlp_out_norm is None:
            x = x + y
            return x + mlp(normed(self.mlp_norm, x)), pages
        x = x + normed(self.attention_out_norm, y)
        return x + normed(self.mlp_out_norm, mlp(normed(self.mlp_norm, x))), pages


class Decoder(nnx.Module):
    """A causal language model, and a pytree: it goes through `jax.jit`, `jax.grad` and optax as it is.

    Args:
      config: what to build.
      rngs: source of the random initial weights; None leaves them zero, to be filled.

    Attributes:
      config: the `ModelConfig`.
      embed: token embedding, `[vocab, embed_size or hidden]`.
      layers: the decoder layers.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        c = config
        self.config = c
        width = c.hidden_size if c.embed_size is None else c.embed_size
        self.embed = new_param(rngs, (c.vocab_size, width), c.dtype)
        learned = c.positions == "learned"
        self.position_embed = new_param(rngs, (c.max_seq_len + c.position_offset, c.hidden_size), c.dtype) if learned else None
        joined = c.embed_size is not None
        self.project_in = new_param(rngs, (c.hidden_size, width), c.dtype) if joined else None
        self.project_out = new_param(rngs, (width, c.hidden_size), c.dtype) if joined else None
        self.layers = nnx.List([Layer(c, i, rngs) for i in range(c.num_layers)])
        self.final_norm = _norm(c) if c.final_norm else None
        self.lm_head = None if c.tie_embeddings else new_param(rngs, (c.vocab_size, width), c.dtype)

    def forward(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        attend: Attend,
        pages: tuple | None = None,
        *,
        deterministic: bool = False,
        remat: bool = False,
    ) -> tuple[Float[Array, "tokens hidden"], tuple | None]:
        """The layers over a flat list of tokens.

        Args:
          tokens: token ids; out-of-range ids are clamped.
          positions: absolute position of each token, >= 0.
          attend: attention over the flat tokens, called once a layer.
          pages: one `Pages` a layer, handed to `attend`; None without a cache.
          deterministic: every product in fixed row tiles.
          remat: recompute each layer in the backward pass instead of keeping its activations.

        Returns:
          Final hidden states before the logits, and the pages.
        """
        c = self.config
        with jax.named_scope("embed"):
            x = value(self.embed).at[tokens].get(mode="clip")
            if c.embed_scale != 1.0:
                x = x * jnp.asarray(c.embed_scale, x.dtype)
            if self.project_in is not None:
                x = linear(x, value(self.project_in), deterministic=deterministic)
            if self.position_embed is not None:
                x = x + value(self.position_embed).at[positions + c.position_offset].get(mode="clip")
            angles = {r: rotary_tables(r, positions) for r in (c.rope, c.local_rope) if r is not None}
        new_pages = []
        for i, layer in enumerate(self.layers):
            run = functools.partial(_run_layer, deterministic=deterministic)
            run = jax.checkpoint(run) if remat else run
            rope = layer.attention.rope
            with jax.named_scope(f"layer_{i}"):
                x, kept = run(layer, x, None if rope is None else angles[rope], attend, None if pages is None else pages[i])
            new_pages.append(kept)
        x = x if self.final_norm is None else self.final_norm(x, deterministic=deterministic)
        return x, None if pages is None else tuple(new_pages)

    def logits(self, hidden: Float[Array, "tokens hidden"], *, deterministic: bool = False) -> Float[Array, "tokens vocab"]:
        """Final hidden states to float32 logits, soft cap included."""
        c = self.config
        with jax.named_scope("logits"):
            if self.project_out is not None:
                hidden = linear(hidden, value(self.project_out), deterministic=deterministic)
            head = value(self.embed if self.lm_head is None else self.lm_head)
            y = linear(hidden, head, deterministic=deterministic).astype(jnp.float32)
            if c.logits_soft_cap is not None:
                y = jnp.tanh(y / c.logits_soft_cap) * c.logits_soft_cap
            return y

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        """Logits of every position, causal, without a cache; differentiable.

        Args:
          tokens: token ids, `[batch, seq]`, seq <= config.max_seq_len.

        Returns:
          float32 logits; position i's predict token i + 1.

        Raises:
          ValueError: the sequences are longer than the model allows.
        """
        batch, seq = tokens.shape
        if seq > self.config.max_seq_len:
            raise ValueError(f"{seq} tokens are more than the model allows ({self.config.max_seq_len})")
        positions = jnp.tile(jnp.arange(seq, dtype=jnp.int32), batch)
        hidden, _ = self.forward(tokens.reshape(-1), positions, Dense(batch, seq))
        return self.logits(hidden).reshape(batch, seq, -1)


@functools.partial(jax.jit, static_argnames="deterministic")
def _run_layer(
    layer: Layer, x: Array, angles: Angles, attend: Attend, pages: Pages | None, *, deterministic: bool
) -> tuple[Array, Pages | None]:
    """A function of its own under jit, so that layers alike are traced once; the compiler puts it in line again."""
    return layer(x, angles, attend, pages, deterministic)


def parameters_nbytes(model: Decoder) -> int:
    """Bytes of all parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(model))
