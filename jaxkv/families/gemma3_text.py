"""Gemma 3, text only: Gemma 2 with head norms instead of soft caps, and another rotary base where a window slides."""

from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.gemma2 import gemma_fields, write_gemma_fields
from jaxkv.families.mapping import llama_tensors
from jaxkv.families.rope import read_rope, write_rope


def read(hf: Any) -> ModelConfig:
    """A `Gemma3TextConfig` as ours."""
    fields = gemma_fields(hf)
    kinds = ("full_attention", "sliding_attention")
    for kind in kinds:
        if kind not in hf.rope_parameters:
            raise ValueError(f"gemma3_text configuration whose rope_parameters lack {kind!r}: {hf.rope_parameters!r}")
    full, local = (read_rope(hf.rope_parameters[k], fields["head_dim"], hf.max_position_embeddings) for k in kinds)
    return ModelConfig(**fields, qk_norm=True, rope=full, local_rope=local if fields["windows"] and local != full else None)


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `Gemma3TextConfig`."""
    if c.rope is None:
        raise ValueError(f"a gemma3_text model needs rotary positions, got positions={c.positions!r}")
    ropes = {"full_attention": c.rope, "sliding_attention": c.local_rope or c.rope}
    return {**write_gemma_fields(c), "rope_parameters": {k: write_rope(r, c.head_dim) for k, r in ropes.items()}}


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", "model.", read, write, llama_tensors, (r".*rotary_emb\.inv_freq",))
