"""GPT-NeoX and Pythia: layer norms, partly rotated heads, attention and MLP side by side or in turn."""

from collections.abc import Iterator
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import Tensor, attention_out, embeddings, norm, plain_mlp, whole
from jaxkv.families.reading import HF_ACTIVATIONS, activation, head_width, refuse, token_ids, write_token_ids
from jaxkv.families.rope import read_single_rope, write_single_rope


def read(hf: Any) -> ModelConfig:
    """A `GPTNeoXConfig` as ours."""
    refuse(hf, {})
    head_dim = head_width(hf, "hidden_size", "num_attention_heads")
    return ModelConfig(
        family="gpt_neox",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        norm="layer",
        norm_eps=hf.layer_norm_eps,
        block="parallel" if hf.use_parallel_residual else "pre",
        qkv_bias=bool(hf.attention_bias),
        out_bias=bool(hf.attention_bias),
        mlp_bias=True,
        mlp="plain",
        activation=activation(hf, "hidden_act"),
        tie_embeddings=bool(hf.tie_word_embeddings),
        **read_single_rope(hf, head_dim, partial=True),
        **token_ids(hf),
    )


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `GPTNeoXConfig`."""
    rope = write_single_rope(c)
    rope["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # the class's own default is 0.25
    return {
        **rope,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.intermediate_size,
        "layer_norm_eps": c.norm_eps,
        "use_parallel_residual": c.block == "parallel",
        "attention_bias": c.qkv_bias,
        "hidden_act": HF_ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tie_embeddings,
        **write_token_ids(c),
    }


def tensors(c: ModelConfig) -> Iterator[Tensor]:
    """`query_key_value` goes head by head, each with its query, key and value: our order."""
    yield from embeddings(c, "gpt_neox.embed_in", "embed_out")
    rows = 3 * c.num_heads * c.head_dim
    for i in range(c.num_layers):
        name, ours = f"gpt_neox.layers.{i}", f"layers.{i}"
        yield whole(f"{name}.attention.query_key_value.weight", f"{ours}.attention.qkv", rows, c.hidden_size)
        if c.qkv_bias:
            yield whole(f"{name}.attention.query_key_value.bias", f"{ours}.attention.qkv_bias", rows)
        yield from attention_out(c, i, f"{name}.attention.dense")
        yield from plain_mlp(c, i, f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
        yield from norm(c, f"{name}.input_layernorm", f"{ours}.attention_norm")
        yield from norm(c, f"{name}.post_attention_layernorm", f"{ours}.mlp_norm")
    yield from norm(c, "gpt_neox.final_layer_norm", "final_norm")


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    read,
    write,
    tensors,
    (r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    "embed_out.weight",
    (("lm_head.weight", "embed_out.weight"),),
)
