"""Mistral: Llama with one sliding window in all layers, or none."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import llama_tensors
from jaxkv.families.reading import llama_fields, one_window, refuse, write_layer_windows, write_llama_fields
from jaxkv.families.rope import read_single_rope, write_single_rope


def read(hf: Any) -> ModelConfig:
    """A `MistralConfig` as ours."""
    refuse(hf, {"layer_types": (None,)})
    fields = llama_fields(hf)
    fields |= read_single_rope(hf, fields["head_dim"])
    return ModelConfig(**fields, windows=one_window(hf))


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `MistralConfig`."""
    window = write_layer_windows(c)["sliding_window"]
    return {**write_llama_fields(c), **write_single_rope(c), "sliding_window": window}


FAMILY = Family("mistral", "MistralForCausalLM", "model.", read, write, llama_tensors, (r".*rotary_emb\.inv_freq",))
