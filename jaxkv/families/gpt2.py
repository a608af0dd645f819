"""GPT-2: layer norms, learned positions, and linear layers stored `[in, out]`."""

from collections.abc import Iterator
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import Part, Tensor, embeddings, norm, whole
from jaxkv.families.reading import HF_ACTIVATIONS, activation, head_width, refuse, token_ids, write_token_ids


def read(hf: Any) -> ModelConfig:
    """A `GPT2Config` as ours."""
    refuse(hf, {"scale_attn_by_inverse_layer_idx": (False,)})
    return ModelConfig(
        family="gpt2",
        vocab_size=hf.vocab_size,
        hidden_size=hf.n_embd,
        num_layers=hf.n_layer,
        num_heads=hf.n_head,
        num_kv_heads=hf.n_head,
        head_dim=head_width(hf, "n_embd", "n_head"),
        intermediate_size=hf.n_inner or 4 * hf.n_embd,
        max_seq_len=hf.n_positions,
        positions="learned",
        norm="layer",
        norm_eps=hf.layer_norm_epsilon,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        query_scale=None if hf.scale_attn_weights else 1.0,
        mlp="plain",
        activation=activation(hf, "activation_function"),
        tie_embeddings=bool(hf.tie_word_embeddings),
        **token_ids(hf),
    )


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `GPT2Config`."""
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.hidden_size,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.intermediate_size,
        "n_positions": c.max_seq_len,
        "layer_norm_epsilon": c.norm_eps,
        "scale_attn_weights": c.query_scale is None,
        "activation_function": HF_ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tie_embeddings,
        **write_token_ids(c),
    }


def tensors(c: ModelConfig) -> Iterator[Tensor]:
    """`c_attn` is `[hidden, (queries, keys, values)]`, each of them `heads * head_dim` wide."""
    hidden, inner = c.hidden_size, c.intermediate_size
    yield from embeddings(c, "transformer.wte")
    yield whole("transformer.wpe.weight", "position_embed", c.max_seq_len, hidden)
    for i in range(c.num_layers):
        name, attention, mlp = f"transformer.h.{i}", f"layers.{i}.attention", f"layers.{i}.mlp"
        yield Tensor(f"{name}.attn.c_attn.weight", (hidden, 3 * hidden), (Part(f"{attention}.qkv", axes=(3, 1, 0, 2)),))
        yield Tensor(f"{name}.attn.c_attn.bias", (3 * hidden,), (Part(f"{attention}.qkv_bias", axes=(1, 0, 2)),))
        yield Tensor(f"{name}.attn.c_proj.weight", (hidden, hidden), (Part(f"{attention}.out", axes=(1, 0)),))
        yield whole(f"{name}.attn.c_proj.bias", f"{attention}.out_bias", hidden)
        yield Tensor(f"{name}.mlp.c_fc.weight", (hidden, inner), (Part(f"{mlp}.up", axes=(1, 0)),))
        yield whole(f"{name}.mlp.c_fc.bias", f"{mlp}.up_bias", inner)
        yield Tensor(f"{name}.mlp.c_proj.weight", (inner, hidden), (Part(f"{mlp}.down", axes=(1, 0)),))
        yield whole(f"{name}.mlp.c_proj.bias", f"{mlp}.down_bias", hidden)
        yield from norm(c, f"{name}.ln_1", f"layers.{i}.attention_norm")
        yield from norm(c, f"{name}.ln_2", f"layers.{i}.mlp_norm")
    yield from norm(c, "transformer.ln_f", "final_norm")


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    read,
    write,
    tensors,
    (r".*\.attn\.(masked_)?bias",),
    refused=frozenset({"scale_attn_by_inverse_layer_idx"}),
)
