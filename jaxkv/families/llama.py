"""Llama 1, 2 and 3, and what shares their architecture (SmolLM2)."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import llama_tensors
from jaxkv.families.reading import llama_fields, refuse, write_llama_fields
from jaxkv.families.rope import read_single_rope, write_single_rope


def read(hf: Any) -> ModelConfig:
    """A `LlamaConfig` as ours."""
    refuse(hf, {"layer_types": (None,), "sliding_window": (None,)})
    fields = llama_fields(hf)
    fields |= read_single_rope(hf, fields["head_dim"])
    bias = bool(hf.attention_bias)
    return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, mlp_bias=bool(hf.mlp_bias))


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `LlamaConfig`."""
    return {**write_llama_fields(c), **write_single_rope(c), "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}


FAMILY = Family("llama", "LlamaForCausalLM", "model.", read, write, llama_tensors, (r".*rotary_emb\.inv_freq",))
