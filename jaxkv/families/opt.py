"""OPT, from 125m to 66b: layer norms, learned positions; the 350m has them after each half, and projected embeddings."""

from collections.abc import Iterator
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import Tensor, embeddings, norm, plain_mlp, split_attention, whole
from jaxkv.families.reading import HF_ACTIVATIONS, activation, head_width, refuse, token_ids, write_token_ids

POSITION_OFFSET = 2  # the table's first two rows stand for padding


def read(hf: Any) -> ModelConfig:
    """An `OPTConfig` as ours."""
    refuse(hf, {"layer_norm_elementwise_affine": (True,)})
    before, bias = bool(hf.do_layer_norm_before), bool(hf.enable_bias)
    return ModelConfig(
        family="opt",
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_attention_heads,
        head_dim=head_width(hf, "hidden_size", "num_attention_heads"),
        intermediate_size=hf.ffn_dim,
        max_seq_len=hf.max_position_embeddings,
        embed_size=None if hf.word_embed_proj_dim == hf.hidden_size else hf.word_embed_proj_dim,
        positions="learned",
        position_offset=POSITION_OFFSET,
        norm="layer",
        block="pre" if before else "post",
        final_norm=before and not getattr(hf, "_remove_final_layer_norm", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        mlp="plain",
        activation=activation(hf, "activation_function"),
        tie_embeddings=bool(hf.tie_word_embeddings),
        **token_ids(hf),
    )


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of an `OPTConfig`."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "ffn_dim": c.intermediate_size,
        "max_position_embeddings": c.max_seq_len,
        "word_embed_proj_dim": c.hidden_size if c.embed_size is None else c.embed_size,
        "do_layer_norm_before": c.block == "pre",
        "_remove_final_layer_norm": c.block == "pre" and not c.final_norm,
        "enable_bias": c.qkv_bias,
        "activation_function": HF_ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tie_embeddings,
        **write_token_ids(c),
    }


def tensors(c: ModelConfig) -> Iterator[Tensor]:
    """Each layer's own `final_layer_norm` is the MLP's; the decoder's is the model's."""
    name = "model.decoder"
    yield from embeddings(c, f"{name}.embed_tokens")
    positions = c.max_seq_len + POSITION_OFFSET
    yield whole(f"{name}.embed_positions.weight", "position_embed", positions, c.hidden_size)
    if c.embed_size is not None:
        yield whole(f"{name}.project_in.weight", "project_in", c.hidden_size, c.embed_size)
        yield whole(f"{name}.project_out.weight", "project_out", c.embed_size, c.hidden_size)
    for i in range(c.num_layers):
        layer = f"{name}.layers.{i}"
        yield from split_attention(c, i, f"{layer}.self_attn", "out_proj")
        yield from plain_mlp(c, i, f"{layer}.fc1", f"{layer}.fc2")
        yield from norm(c, f"{layer}.self_attn_layer_norm", f"layers.{i}.attention_norm")
        yield from norm(c, f"{layer}.final_layer_norm", f"layers.{i}.mlp_norm")
    if c.final_norm:
        yield from norm(c, f"{name}.final_layer_norm", "final_norm")


FAMILY = Family("opt", "OPTForCausalLM", "model.", read, write, tensors, refused=frozenset({"layer_norm_elementwise_affine"}))
