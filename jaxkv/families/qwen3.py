"""Qwen3 (dense): Llama with norms on each query and key head, and sliding windows from some layer on."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import llama_tensors
from jaxkv.families.reading import layer_windows, llama_fields, refuse, write_layer_windows, write_llama_fields
from jaxkv.families.rope import read_single_rope, write_single_rope


def read(hf: Any) -> ModelConfig:
    """A `Qwen3Config` as ours."""
    refuse(hf, {})
    fields = llama_fields(hf)
    fields |= read_single_rope(hf, fields["head_dim"])
    bias = bool(hf.attention_bias)
    return ModelConfig(**fields, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=layer_windows(hf))


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `Qwen3Config`."""
    fields = {**write_llama_fields(c), **write_single_rope(c), **write_layer_windows(c)}
    return {**fields, "use_sliding_window": bool(c.windows), "attention_bias": c.qkv_bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", "model.", read, write, llama_tensors, (r".*rotary_emb\.inv_freq",))
