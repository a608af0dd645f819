"""Gemma 2: norms on both sides of each half, soft caps, windows in alternating layers, scaled embeddings."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import llama_tensors
from jaxkv.families.reading import layer_windows, llama_fields, refuse, write_layer_windows, write_llama_fields
from jaxkv.families.rope import read_rope, write_rope


def gemma_fields(hf: Any) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share."""
    refuse(hf, {})
    fields = llama_fields(hf, "hidden_activation")
    bias, scale = bool(hf.attention_bias), hf.query_pre_attn_scalar**-0.5
    return {
        **fields,
        "embed_scale": hf.hidden_size**0.5,
        "norm_plus_one": True,
        "block": "sandwich",
        "qkv_bias": bias,
        "out_bias": bias,
        "query_scale": None if scale == fields["head_dim"] ** -0.5 else scale,
        "windows": layer_windows(hf),
        "attn_soft_cap": hf.attn_logit_softcapping,
        "logits_soft_cap": hf.final_logit_softcapping,
    }


def write_gemma_fields(c: ModelConfig) -> dict[str, Any]:
    """The inverse of `gemma_fields`."""
    windows = write_layer_windows(c)
    return {
        **write_llama_fields(c, "hidden_activation"),
        "layer_types": windows["layer_types"],
        "sliding_window": windows["sliding_window"] or c.max_seq_len,  # without a windowed layer it is not read
        "attention_bias": c.qkv_bias,
        "query_pre_attn_scalar": c.head_dim if c.query_scale is None else round(c.query_scale**-2),
        "attn_logit_softcapping": c.attn_soft_cap,
        "final_logit_softcapping": c.logits_soft_cap,
    }


def read(hf: Any) -> ModelConfig:
    """A `Gemma2Config` as ours."""
    fields = gemma_fields(hf)
    return ModelConfig(**fields, rope=read_rope(hf.rope_parameters, fields["head_dim"], hf.max_position_embeddings))


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `Gemma2Config`."""
    if c.rope is None:
        raise ValueError(f"a gemma2 model needs rotary positions, got positions={c.positions!r}")
    return {**write_gemma_fields(c), "rope_parameters": write_rope(c.rope, c.head_dim)}


FAMILY = Family("gemma2", "Gemma2ForCausalLM", "model.", read, write, llama_tensors, (r".*rotary_emb\.inv_freq",))
