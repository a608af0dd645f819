"""Writes a transformers model as a GGUF file the way llama.cpp's converter does: names by the gguf package's own tables, and
the forms GGUF keeps tensors in, written down here once more on their own."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_neox": "gptneox"}


def common_metadata(config: Any) -> dict[str, Any]:
    """The entries that every architecture has."""
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
    }


def metadata(config: Any) -> dict[str, Any]:
    """An architecture's entries, without its name in front."""
    out = common_metadata(config)
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * config.n_embd
        return out | {"feed_forward_length": inner, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    out["feed_forward_length"] = config.intermediate_size
    if config.model_type == "gpt_neox":
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = int(head_dim * config.rope_parameters["partial_rotary_factor"])
        out |= {"use_parallel_residual": config.use_parallel_residual, "rope.dimension_count": rotary}
        return out | {"attention.layer_norm_epsilon": config.layer_norm_eps}
    out |= {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size or config.model_type.startswith("gemma"):
        out |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.model_type == "gemma3_text":
        out["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
        out["rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
        out["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    else:
        out["rope.freq_base"] = config.rope_parameters["rope_theta"]
    if config.model_type == "gemma2":
        out["attn_logit_softcapping"] = config.attn_logit_softcapping
        out["final_logit_softcapping"] = config.final_logit_softcapping
    if config.model_type in ("gemma2", "gemma3_text", "phi3") and config.sliding_window:
        out["attention.sliding_window"] = config.sliding_window
    return out


def stored_form(config: Any, name: str, tensor: np.ndarray) -> np.ndarray:
    """A tensor as llama.cpp's converter stores it."""
    kind, heads = config.model_type, config.num_attention_heads
    if kind == "llama" and ("q_proj" in name or "k_proj" in name):
        rows = heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(rows, 2, tensor.shape[0] // rows // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return np.ascontiguousarray(tensor.T)
    if kind == "gpt_neox" and "query_key_value" in name:
        by_head = tensor.reshape(heads, 3, tensor.shape[0] // heads // 3, *tensor.shape[1:])
        return np.concatenate([by_head[:, i].reshape(-1, *tensor.shape[1:]) for i in range(3)])
    return tensor


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> None:
    """Write a model.

    Args:
      path: file to write.
      model: a transformers model.
      kind: storage type of all matrices; what has one axis stays float32.
      extra: further entries of the architecture.
      tensors: further tensors.
      tokenizer: entries below "tokenizer.".
    """
    config = model.config
    name_of = ARCHITECTURES.get(config.model_type, config.model_type)
    (architecture,) = (a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name_of)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, name_of)
    for key, value in (metadata(config) | (extra or {})).items():
        add_entry(writer, f"{name_of}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add_entry(writer, f"tokenizer.{key}", value)
    state = {k: v.detach().float().numpy() for k, v in model.state_dict().items()}
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = stored_form(config, name, tensor)
        if stored.ndim == 1:
            writer.add_tensor(theirs, stored)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(np.ascontiguousarray(stored), kind), raw_dtype=kind)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)


def add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_in_place(model: Any, kind: gguf.GGMLQuantizationType) -> None:
    """What a model's matrices become by being stored in GGUF."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                stored = stored_form(model.config, name, parameter.numpy())
                packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
                read = gguf.quants.dequantize(packed, kind).reshape(stored.shape)
                parameter.copy_(torch.from_numpy(undo_form(model.config, name, read)))


def undo_form(config: Any, name: str, stored: np.ndarray) -> np.ndarray:
    """The inverse of `stored_form`, found by sending the places of all elements through it."""
    shape = stored.T.shape if config.model_type == "gpt2" and stored_is_turned(config, name, stored) else stored.shape
    places = stored_form(config, name, np.arange(stored.size).reshape(shape))
    out = np.empty(stored.size, stored.dtype)
    out[places.reshape(-1)] = stored.reshape(-1)
    return out.reshape(shape)


def stored_is_turned(config: Any, name: str, stored: np.ndarray) -> bool:
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
