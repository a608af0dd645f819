"""A decoder layer and its parts: norms, MLP, and the projections around attention.

Everything here works on a flat list of tokens, `[tokens, ...]`; which tokens belong to one sequence is known to attention alone.
How numbers are computed stands in one `Numerics`, which `attend` carries. Weights keep Hugging Face's `[out, in]` orientation.
Matrices that read the same input are stored as one array, so that a step reads them with one product: `qkv` is
`[kv_heads, q_per_kv + 2, head_dim, in]` (each kv head's queries, then its key, then its value: splitting kv_heads over devices cuts no
head apart), `up` of a gated MLP is `[2, intermediate, in]`.
"""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

import pallas_kernels
from jaxkv.cache.pages import Pages
from jaxkv.config import Activation, ModelConfig
from jaxkv.model.attend import AttentionSpec
from jaxkv.ops.linear import linear
from jaxkv.ops.numerics import Numerics
from pallas_kernels.rotation_xla import rotate, split
from pallas_kernels.row_tiles import in_row_tiles


@runtime_checkable
class Attend(Protocol):
    """`Dense` or `Paged`, or another pytree that can be called so and says how numbers are computed."""

    @property
    def numerics(self) -> Numerics:
        """How attention, and everything that goes with it, is computed."""
        ...

    @property
    def live(self) -> Array | None:
        """bool[tokens], the tokens whose results are needed, or None for all."""
        ...

    def __call__(self, spec: AttentionSpec, q: Array, k: Array, v: Array, pages: Any, /) -> tuple[Array, Any]:
        """Context of the queries, and the pages with the new keys and values in."""
        ...


Angles = tuple[Array, Array] | None
"""cos and sin of each token's rotary angles, None in a layer without rotation."""


def value(param: Any) -> Array:
    """The array inside an nnx parameter."""
    return param[...]


def optional(param: Any) -> Array | None:
    """The array inside an nnx parameter, or None where the model has none."""
    return None if param is None else param[...]


def new_param(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: str, std: float | None = 0.02) -> nnx.Param:
    """A parameter of normal noise of standard deviation `std`, or of zeros where it or `rngs` is None."""
    if std is None or rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(std, dtype))


class Norm(nnx.Module):
    """RMS or layer normalisation over the last axis, computed in float32, returned in x's dtype."""

    def __init__(self, kind: str, size: int, *, eps: float, plus_one: bool, dtype: str):
        self.kind, self.eps, self.plus_one = kind, eps, plus_one
        self.weight = nnx.Param(jnp.zeros(size, dtype) if plus_one else jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if kind == "layer" else None

    def __call__(self, x: Float[Array, "*rows size"], numerics: Numerics) -> Float[Array, "*rows size"]:
        """Normalise the last axis."""
        kind = functools.partial(normalise, self.kind, self.eps, self.plus_one)
        flat, weights = x.reshape(-1, x.shape[-1]), (value(self.weight),)
        if self.bias is not None:
            weights = (*weights, value(self.bias))
        y = in_row_tiles(kind, (flat,), weights) if numerics.deterministic else kind(flat, *weights)
        return y.reshape(x.shape)


def normalise(kind: str, eps: float, plus_one: bool, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """What `Norm` computes, for x [rows, size]."""
    y = x.astype(jnp.float32)
    if kind == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32)[None]
    y = y * (weight + 1.0 if plus_one else weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.astype(x.dtype)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def activate(name: Activation, x: Array) -> Array:
    """Apply an activation by its configuration name."""
    return _ACTIVATIONS[name](x)


class MLP(nnx.Module):
    """The feed-forward half of a layer: `down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None):
        c = config
        self.config = c
        up = (2, c.intermediate_size) if c.mlp == "gated" else (c.intermediate_size,)
        self.up = new_param(rngs, (*up, c.hidden_size), c.dtype)
        self.down = new_param(rngs, (c.hidden_size, c.intermediate_size), c.dtype)
        self.up_bias = new_param(rngs, up, c.dtype, None) if c.mlp_bias else None
        self.down_bias = new_param(rngs, (c.hidden_size,), c.dtype, None) if c.mlp_bias else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], numerics: Numerics, live: Bool[Array, " tokens"] | None = None
    ) -> Float[Array, "tokens hidden"]:
        """Widen, activate, narrow."""
        y = linear(x, value(self.up), optional(self.up_bias), numerics, live)
        if self.config.mlp == "gated":
            y = activate(self.config.activation, y[:, 0]) * y[:, 1]
        else:
            y = activate(self.config.activation, y)
        return linear(y, value(self.down), optional(self.down_bias), numerics, live)


def make_norm(config: ModelConfig, kind: str | None = None, size: int | None = None) -> Norm:
    """A norm of a model, of its hidden size unless another is given."""
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
        self.q_norm = make_norm(c, "rms", c.head_dim) if c.qk_norm else None
        self.k_norm = make_norm(c, "rms", c.head_dim) if c.qk_norm else None

    def __call__(
        self, x: Float[Array, "tokens hidden"], angles: Angles, attend: Attend, pages: Pages | None
    ) -> tuple[Float[Array, "tokens hidden"], Pages | None]:
        """Attention's contribution to the residual stream, and the pages with the new tokens in."""
        tokens, numerics, live = x.shape[0], attend.numerics, attend.live
        qkv = linear(x, value(self.qkv), optional(self.qkv_bias), numerics, live)
        if self.q_norm is None and angles is not None:
            q, k, v = pallas_kernels.split_rotated(qkv, *angles, implementation=numerics.product)
        else:
            q, k, v = split(qkv)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q, numerics), self.k_norm(k, numerics)
            if angles is not None:
                q, k = rotate(q, *angles), rotate(k, *angles)
        with jax.named_scope("attend"):
            context, pages = attend(self.spec, q, k, v, pages)
        return linear(context.reshape(tokens, -1), value(self.out), optional(self.out_bias), numerics, live), pages


class Layer(nnx.Module):
    """Attention and MLP, with the norms where `config.block` puts them."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs | None):
        self.config = config
        self.attention, self.mlp = Attention(config, layer, rngs), MLP(config, rngs)
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        sandwich = config.block == "sandwich"
        self.attention_out_norm, self.mlp_out_norm = (make_norm(config), make_norm(config)) if sandwich else (None, None)

    def __call__(
        self, x: Float[Array, "tokens hidden"], angles: Angles, attend: Attend, pages: Pages | None
    ) -> tuple[Float[Array, "tokens hidden"], Pages | None]:
        """The residual stream behind the layer, and the pages with the new tokens in."""
        block = self.config.block

        def attention(y: Array) -> tuple[Array, Pages | None]:
            with jax.named_scope("attention"):
                return self.attention(y, angles, attend, pages)

        def mlp(y: Array) -> Array:
            with jax.named_scope("mlp"):
                return self.mlp(y, attend.numerics, attend.live)

        def normed(by: Norm, y: Array) -> Array:
            return by(y, attend.numerics)

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
