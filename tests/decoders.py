"""Tiny random decoders of every architecture the configuration can say: nothing to download, no family, no tokenizer.

Weights are larger than an untrained model's, and norms and biases random too: greedy tokens vary, and a part that is
left out shows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv

VOCAB = 61
ROPE = jaxkv.Rope(rotary_dim=8)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_kv_heads": 4, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tie_embeddings": True},
    "mqa": {"num_kv_heads": 1, "qk_norm": True},
    "learned": {
        "positions": "learned",
        "position_offset": 2,
        "rope": None,
        "norm": "layer",
        "num_kv_heads": 4,
        "mlp": "plain",
        "activation": "relu",
        "qkv_bias": True,
    },
    "post": {
        "positions": "learned",
        "rope": None,
        "norm": "layer",
        "block": "post",
        "embed_size": 16,
        "final_norm": False,
        "mlp": "plain",
        "activation": "gelu",
    },
    "parallel": {"block": "parallel", "norm": "layer", "rope": jaxkv.Rope(rotary_dim=4), "mlp": "plain", "activation": "gelu"},
    "window": {"windows": (5, None), "num_kv_heads": 2},
    "sandwich": {
        "block": "sandwich",
        "norm_plus_one": True,
        "embed_scale": 32**0.5,
        "windows": (7, None),
        "local_rope": jaxkv.Rope(theta=100.0, rotary_dim=8),
        "attn_soft_cap": 2.0,
        "logits_soft_cap": 4.0,
        "query_scale": 0.5,
        "activation": "gelu_tanh",
    },
    "dynamic": {"rope": jaxkv.Rope(rotary_dim=8, kind="dynamic", factor=2.0, original_max_seq_len=20)},
}


def config(architecture: str = "gqa", **changes: Any) -> jaxkv.ModelConfig:
    """A two-layer configuration, by the name of its architecture."""
    base: dict[str, Any] = {
        "family": "tiny",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_seq_len": 128,
        "rope": ROPE,
    }
    return jaxkv.ModelConfig(**{**base, **ARCHITECTURES[architecture], **changes})


@functools.cache
def decoder(architecture: str = "gqa", *, scale: float = 8.0, seed: int = 0, **changes: Any) -> jaxkv.Decoder:
    """A model with matrices `scale` times an untrained model's."""
    model = jaxkv.Decoder(config(architecture, **changes), rngs=nnx.Rngs(seed))
    leaves, tree = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))

    def grown(x: jax.Array, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, x.shape, x.dtype) * jnp.asarray(0.1, x.dtype)
        return x + noise if x.ndim == 1 else x * jnp.asarray(scale, x.dtype)

    return jax.tree.unflatten(tree, [grown(x, key) for x, key in zip(leaves, keys, strict=True)])


def with_ends(model: jaxkv.Decoder, ends: tuple[int, ...]) -> jaxkv.Decoder:
    """The same weights, whose configuration names end tokens."""
    graph, state = nnx.split(jaxkv.Decoder(dataclasses.replace(model.config, eos_token_ids=ends), rngs=None))
    leaves = jax.tree.leaves(model)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def random_tokens(seed: int, *shape: int) -> jax.Array:
    """Token ids of the tiny vocabulary."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape), jnp.int32)


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    """Prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


@functools.cache
def _plain(shape: tuple[int, int]) -> Any:
    del shape  # one program per shape, kept here so that a test file compiles it once
    return jax.jit(lambda model, tokens: model(tokens))


def plain_logits(model: jaxkv.Decoder, tokens: jax.Array) -> np.ndarray:
    """Logits of the model without a cache, [batch, seq, vocab]."""
    return np.asarray(_plain(tokens.shape)(model, tokens))


def naive_greedy(model: jaxkv.Decoder, prompt: list[int], count: int) -> list[int]:
    """The oracle of generate: recompute everything for every token. Padded to one width, which causality allows."""
    tokens = list(prompt)
    for _ in range(count):
        padded = tokens + [0] * (-(-(len(prompt) + count) // 32) * 32 - len(tokens))
        tokens.append(int(np.argmax(plain_logits(model, jnp.asarray([padded], jnp.int32))[0, len(tokens) - 1])))
    return tokens[len(prompt) :]
