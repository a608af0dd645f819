"""Phi-3: Llama with fused tensors, partly rotated heads, and one sliding window in all layers or none."""

from collections.abc import Iterator
from typing import Any

from jaxkv.config import ModelConfig
from jaxkv.families.family import Family
from jaxkv.families.mapping import PRE_NORMS, Tensor, attention_out, embeddings, linear, norm, qkv_parts, whole
from jaxkv.families.reading import llama_fields, one_window, refuse, write_layer_windows, write_llama_fields
from jaxkv.families.rope import read_single_rope, write_single_rope


def read(hf: Any) -> ModelConfig:
    """A `Phi3Config` as ours."""
    refuse(hf, {"layer_types": (None,)})
    fields = llama_fields(hf)
    fields |= read_single_rope(hf, fields["head_dim"], partial=True)
    return ModelConfig(**fields, windows=one_window(hf))


def write(c: ModelConfig) -> dict[str, Any]:
    """Ours as the fields of a `Phi3Config`."""
    window = write_layer_windows(c)["sliding_window"]
    return {**write_llama_fields(c), **write_single_rope(c), "sliding_window": window}


def tensors(c: ModelConfig) -> Iterator[Tensor]:
    """`qkv_proj` holds all queries, then all keys, then all values; `gate_up_proj` the gate first."""
    yield from embeddings(c, "model.embed_tokens")
    for i in range(c.num_layers):
        name, ours = f"model.layers.{i}", f"layers.{i}"
        blocks = qkv_parts(c, f"{ours}.attention.qkv").values()
        rows = sum(n for _, n in blocks)
        yield Tensor(f"{name}.self_attn.qkv_proj.weight", (rows, c.hidden_size), tuple(part for part, _ in blocks))
        yield from attention_out(c, i, f"{name}.self_attn.o_proj")
        yield whole(f"{name}.mlp.gate_up_proj.weight", f"{ours}.mlp.up", 2 * c.intermediate_size, c.hidden_size)
        yield from linear(f"{name}.mlp.down_proj", f"{ours}.mlp.down", c.hidden_size, c.intermediate_size, False, "")
        for theirs, mine in PRE_NORMS.items():
            yield from norm(c, f"{name}.{theirs}", f"{ours}.{mine}")
    yield from norm(c, "model.norm", "final_norm")


FAMILY = Family("phi3", "Phi3ForCausalLM", "model.", read, write, tensors, (r".*rotary_emb\.inv_freq",))
