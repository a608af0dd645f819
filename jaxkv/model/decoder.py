"""The decoder: embed, layers, logits. One module for every family, driven by `ModelConfig`.

forward          the layers over a flat list of tokens, whatever attends
forward_paged    the one way through the model over pages: `step`, `extend`, beam search and speculation all call it
__call__         whole sequences without a cache
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.pages import Pages
from jaxkv.cache.tables import Tables
from jaxkv.config import ModelConfig, shown
from jaxkv.model.attend import Dense
from jaxkv.model.layers import Angles, Attend, Layer, make_norm, new_param, value
from jaxkv.model.rotary import rotary_tables
from jaxkv.model.segments import Paged, Segment
from jaxkv.model.token_ids import ROWS, ArrayLike, as_int32, check_tokens, read_rectangle
from jaxkv.ops.linear import linear
from jaxkv.ops.numerics import DEFAULT, Numerics
from jaxkv.sharding import automatic, check_mesh, on_automatic_axes, sharding_of


class Decoder(nnx.Module):
    """A causal language model, and a pytree: it goes through `jax.jit`, `jax.grad` and optax as it is.

    Args:
      config: what to build.
      rngs: source of the random initial weights; None leaves them zero, to be filled. It must be said which.
      mesh: devices to spread weights, pages and attention over, with an axis "tensor" (see `jaxkv.sharding`); None is one device.

    Attributes:
      config: the `ModelConfig`; its dtype is that of the parameters, also after they were cast.
      mesh: the mesh, its axes automatic, or None.
      embed: token embedding, `[vocab, embed_size or hidden]`.
      layers: the decoder layers.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, mesh: Mesh | None = None):
        c = config
        self._built_from, self.mesh = c, None if mesh is None else automatic(mesh)
        width = c.hidden_size if c.embed_size is None else c.embed_size
        self.embed = new_param(rngs, (c.vocab_size, width), c.dtype)
        learned = c.positions == "learned"
        self.position_embed = new_param(rngs, (c.max_seq_len + c.position_offset, c.hidden_size), c.dtype) if learned else None
        joined = c.embed_size is not None
        self.project_in = new_param(rngs, (c.hidden_size, width), c.dtype) if joined else None
        self.project_out = new_param(rngs, (width, c.hidden_size), c.dtype) if joined else None
        self.layers = nnx.List([Layer(c, i, rngs) for i in range(c.num_layers)])
        self.final_norm = make_norm(c) if c.final_norm else None
        self.lm_head = None if c.tie_embeddings else new_param(rngs, (c.vocab_size, width), c.dtype)
        if mesh is not None:
            self._place(mesh)

    @property
    def config(self) -> ModelConfig:
        """What the model is now. The parameters own the dtype: `jax.tree.map` casts them and knows of no configuration.

        Raises:
          ValueError: the parameters were cast to a dtype that no model runs in.
        """
        built, dtype = self._built_from, getattr(self.embed.get_value(), "dtype", None)  # None: no array, but jax's placeholder
        return built if dtype is None or dtype == built.dtype else dataclasses.replace(built, dtype=jnp.dtype(dtype).name)

    def __repr__(self) -> str:
        c, leaves = self.config, [x for x in jax.tree.leaves(self) if hasattr(x, "dtype") and hasattr(x, "size")]
        heads = f"{c.num_heads} heads of {c.head_dim} ({c.num_kv_heads} kv)"
        sizes = f"hidden {c.hidden_size}, vocabulary {c.vocab_size}, up to {c.max_seq_len} tokens"
        dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
        count, nbytes = sum(x.size for x in leaves), sum(x.size * x.dtype.itemsize for x in leaves)
        mesh = "one device" if self.mesh is None else f"mesh {dict(self.mesh.shape)}"
        return (
            f"Decoder({c.family}: {c.num_layers} layers, {heads}, {sizes},\n"
            f"        {count / 1e6:.4g} million parameters, {dtypes}, {nbytes / 1e6:.4g} MB, {mesh})"
        )

    __str__ = __repr__  # flax's own, which prints every layer with its configuration, would go before it

    def _place(self, mesh: Mesh) -> None:
        """Each parameter where the table of `jaxkv.sharding` says."""
        check_mesh(self.config, mesh)
        state = nnx.to_flat_state(nnx.state(self))
        placed = [
            (path, v.replace(jax.device_put(v[...], sharding_of(self.config, parameter_name(path), mesh)))) for path, v in state
        ]
        nnx.update(self, nnx.from_flat_state(placed))

    def forward(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        attend: Attend,
        pages: tuple[Pages, ...] | None = None,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[Pages, ...] | None]:
        """The layers over a flat list of tokens.

        Args:
          tokens: token ids; out-of-range ids are clamped.
          positions: absolute position of each token, >= 0.
          attend: attention over the flat tokens, called once a layer; it carries how numbers are computed.
          pages: one `Pages` a layer, handed to `attend`; None without a cache.
          remat: recompute each layer in the backward pass instead of keeping its activations.

        Returns:
          Final hidden states before the logits, and the pages.
        """
        c, numerics = self.config, attend.numerics
        with jax.named_scope("embed"):
            x = value(self.embed).at[tokens].get(mode="clip")
            if c.embed_scale != 1.0:
                x = x * jnp.asarray(c.embed_scale, x.dtype)
            if self.project_in is not None:
                x = linear(x, value(self.project_in), None, numerics, attend.live)
            if self.position_embed is not None:
                x = x + value(self.position_embed).at[positions + c.position_offset].get(mode="clip")
            angles = {r: rotary_tables(r, positions) for r in (c.rope, c.local_rope) if r is not None}
        new_pages = []
        for i, layer in enumerate(self.layers):
            run = jax.checkpoint(_run_layer) if remat else _run_layer
            rope = layer.attention.rope
            with jax.named_scope(f"layer_{i}"):
                x, kept = run(layer, x, None if rope is None else angles[rope], attend, None if pages is None else pages[i])
            new_pages.append(kept)
        x = x if self.final_norm is None else self.final_norm(x, numerics)
        return x, None if pages is None else tuple(new_pages)

    def forward_paged(
        self,
        tokens: Int[Array, " tokens"],
        segments: tuple[Segment, ...],
        tables: Tables,
        pages: tuple[Pages, ...],
        numerics: Numerics,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[Pages, ...]]:
        """New tokens through the layers, which write their keys and values into pages and attend through block tables.

        Args:
          tokens: token ids, the segments' rectangles one after the other.
          segments: which rows the tokens belong to.
          tables: block tables that name the pages of the new positions already; a segment's own lengths count, not theirs.
          pages: one `Pages` a layer.
          numerics: how numbers are computed.

        Returns:
          Final hidden states before the logits, and the pages with the new tokens in.
        """
        attend = Paged.over(segments, tables, numerics, self.mesh)
        hidden, written = self.forward(tokens, attend.positions(), attend, pages)
        assert written is not None
        return hidden, written

    def logits(
        self, hidden: Float[Array, "tokens hidden"], numerics: Numerics = DEFAULT, live: Bool[Array, " tokens"] | None = None
    ) -> Float[Array, "tokens vocab"]:
        """Final hidden states to float32 logits, soft cap included; those of tokens that are not `live` mean nothing."""
        c = self.config
        with jax.named_scope("logits"):
            if self.project_out is not None:
                hidden = linear(hidden, value(self.project_out), None, numerics, live)
            head = value(self.embed if self.lm_head is None else self.lm_head)
            y = linear(hidden, head, None, numerics, live).astype(jnp.float32)
            if c.logits_soft_cap is not None:
                y = jnp.tanh(y / c.logits_soft_cap) * c.logits_soft_cap
            return y

    def __call__(
        self, tokens: Int[Array | np.ndarray, "batch seq"] | Sequence[Sequence[int]]
    ) -> Float[Array, "batch seq vocab"]:
        """Logits of every position, causal, without a cache; differentiable.

        Args:
          tokens: token ids, `[batch, seq]`, seq <= config.max_seq_len; an array, or a list of lists of one length.

        Returns:
          float32 logits; position i's predict token i + 1.

        Raises:
          ValueError: an id is outside the vocabulary (where they are known), the sequences are longer than the model allows, or tokens
            are something else.
        """
        ids = read_rectangle(tokens)
        check_tokens(ids, None, self.config.vocab_size, ROWS.tokens)
        if ids.shape[1] > self.config.max_seq_len:
            raise ValueError(f"{ids.shape[1]} tokens are more than the model allows ({self.config.max_seq_len})")
        return on_automatic_axes(_whole_sequences, as_int32(ids), self)


def _whole_sequences(tokens: ArrayLike, model: Decoder) -> Array:
    batch, seq = tokens.shape
    positions = jnp.tile(jnp.arange(seq, dtype=jnp.int32), batch)
    hidden, _ = model.forward(jnp.asarray(tokens).reshape(-1), positions, Dense(batch, seq, mesh=model.mesh))
    return model.logits(hidden).reshape(batch, seq, -1)


@jax.jit
def _run_layer(layer: Layer, x: Array, angles: Angles, attend: Attend, pages: Pages | None) -> tuple[Array, Pages | None]:
    """A function of its own under jit, so that layers alike are traced once; the compiler puts it in line again."""
    return layer(x, angles, attend, pages)


def parameter_name(path: tuple) -> str:
    """A parameter's path in the module as the families' tables write it: "layers.0.attention.qkv"."""
    return ".".join(str(part) for part in path)


def check_decoder(model: Any, name: str = "model") -> None:
    """Raise ValueError unless it is a `Decoder`."""
    if isinstance(model, Decoder):
        return
    way = ""
    if isinstance(getattr(model, "decoder", None), Decoder):
        way = f": give its decoder, {name}.decoder"
    elif isinstance(model, tuple) and any(isinstance(part, Decoder) for part in model):
        way = ": jaxkv.load returns model and tokenizer, model, tokenizer = jaxkv.load(...)"
    elif isinstance(model, str):
        way = ": load it first, model, tokenizer = jaxkv.load(...)"
    what = shown(model) if isinstance(model, str) else f"a {type(model).__name__}"
    raise ValueError(f"{name} must be a jaxkv.Decoder, got {what}{way}")


def parameters_nbytes(model: Decoder) -> int:
    """Bytes of all parameters."""
    return sum(x.nbytes for x in jax.tree.leaves(model))
