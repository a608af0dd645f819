"""GGUF's metadata as the fields of a Hugging Face configuration."""

from typing import Any

import numpy as np

from jaxkv.config import Rope
from jaxkv.families.checking import number, token
from jaxkv.model.rotary import inverse_frequencies
from jaxkv.weights.gguf_file import GGUFFile

FAMILY_OF_ARCHITECTURE = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
}
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_SCALING_KNOWN = {"type", "factor", "original_context_length", "finetuned", *_YARN}
# GGUF's neutral values of rotary scaling: they change nothing.
_SCALING_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.1}


class _Metadata:
    """An architecture's entries, without its name in front."""

    def __init__(self, file: GGUFFile):
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in FAMILY_OF_ARCHITECTURE:
            known = ", ".join(FAMILY_OF_ARCHITECTURE)
            raise ValueError(f"unknown GGUF architecture {name!r} (general.architecture); supported: {known}")
        self.architecture: str = name

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = None) -> Any:
        """A number above 0, with a default unless that is None; it may be written once per layer, then all layers must agree."""
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"the GGUF metadata lacks {self.architecture}.{key}")
        values = value if isinstance(value, list) else [value]
        if len({repr(v) for v in values}) != 1:
            raise ValueError(f"unsupported {self.architecture}.{key}={value}: it differs between layers")
        number(f"{self.architecture}.{key}", values[0], above=0)
        return values[0]

    def size(self, key: str, default: Any = None) -> int:
        """The same, a whole number."""
        value = self.number(key, default)
        if not isinstance(value, int) or value >= 2**31:
            raise ValueError(f"{self.architecture}.{key} must be an integer below 2147483648, got {value!r}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def read_fields(file: GGUFFile) -> dict[str, Any]:
    """What the file's metadata says, in the words of the family's `config.json`.

    Raises:
      ValueError: the architecture is unknown, an entry is missing, or one is not supported.
    """
    m = _Metadata(file)
    for key in ("expert_count", "expert_used_count"):
        if m.get(key):
            raise ValueError(f"unsupported {m.architecture}.{key}={m.get(key)}: mixtures of experts")
    if not m.has("token_embd.weight"):
        raise ValueError("the file lacks the tensor token_embd.weight")
    shared = {
        "model_type": FAMILY_OF_ARCHITECTURE[m.architecture],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": not m.has("output.weight"),
        **_token_ids(file),
    }
    if m.architecture == "gpt2":
        return shared | _gpt2(m)
    if m.architecture == "gptneox":
        return shared | _gpt_neox(m)
    return shared | _llama_like(m)


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    ids = {k: file.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding", "eot", "eom")}
    for name, value in ids.items():
        token(f"tokenizer.ggml.{name}_token_id", value)
    ends = dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None)
    return {"bos_token_id": ids["bos"], "eos_token_id": list(ends) or None, "pad_token_id": ids["padding"]}


def _llama_like(m: _Metadata) -> dict[str, Any]:
    heads = m.size("attention.head_count")
    head_dim = m.size("attention.key_length", m.size("embedding_length") // heads)
    if m.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"unsupported value_length={m.get('attention.value_length')} with key_length={head_dim}")
    fields = {
        "max_position_embeddings": m.size("context_length"),
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": m.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": m.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(m, head_dim),
    }
    if m.architecture == "llama":
        fields |= {"attention_bias": m.has("blk.0.attn_q.bias"), "mlp_bias": m.has("blk.0.ffn_gate.bias")}
    if m.architecture == "qwen3":
        fields |= {"attention_bias": m.has("blk.0.attn_q.bias")}
    if m.architecture == "phi3":
        fields |= {"sliding_window": m.get("attention.sliding_window") or None}
    if m.architecture.startswith("gemma"):
        fields |= _gemma(m, fields)
    return fields


def _gemma(m: _Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    gemma2, layers = m.architecture == "gemma2", fields["num_hidden_layers"]
    # The file does not hold the query scaling; of all released models the two 27B ones differ from head_dim.
    scalar = fields["head_dim"]
    if layers == (46 if gemma2 else 62):
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    pattern = m.get("attention.sliding_window_pattern", 2 if gemma2 else 6)
    if not isinstance(pattern, list):
        pattern = m.size("attention.sliding_window_pattern", 2 if gemma2 else 6)
    slides = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    out = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": m.get("attention.sliding_window", 4096),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0 if gemma2 else None),
        "final_logit_softcapping": m.get("final_logit_softcapping", 30.0 if gemma2 else None),
    }
    if not gemma2:
        full = {**fields["rope_parameters"], "rope_theta": m.get("rope.freq_base", 1e6)}
        local = {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", 1e4)}
        out["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return out


def _gpt2(m: _Metadata) -> dict[str, Any]:
    return {
        "n_embd": m.size("embedding_length"),
        "n_layer": m.size("block_count"),
        "n_head": m.size("attention.head_count"),
        "n_inner": m.size("feed_forward_length"),
        "n_positions": m.size("context_length"),
        "layer_norm_epsilon": m.number("attention.layer_norm_epsilon"),
    }


def _gpt_neox(m: _Metadata) -> dict[str, Any]:
    heads = m.size("attention.head_count")
    return {
        "hidden_size": m.size("embedding_length"),
        "num_hidden_layers": m.size("block_count"),
        "num_attention_heads": heads,
        "intermediate_size": m.size("feed_forward_length"),
        "max_position_embeddings": m.size("context_length"),
        "layer_norm_eps": m.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": m.get("use_parallel_residual", True),
        "attention_bias": m.has("blk.0.attn_qkv.bias"),
        "rope_parameters": _rope(m, m.size("embedding_length") // heads),
    }


def _rope(m: _Metadata, head_dim: int) -> dict[str, Any]:
    theta = m.number("rope.freq_base", 10_000.0)
    rotary_dim = m.size("rope.dimension_count", head_dim)
    out = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary_dim / head_dim}
    if m.has("rope_factors_long.weight") or m.has("rope_factors_short.weight"):
        raise ValueError("unsupported rope scaling 'longrope' (tensors rope_factors_long, rope_factors_short)")
    if m.has("rope_freqs.weight"):
        return out | _llama3(m.file.read("rope_freqs.weight"), theta, rotary_dim)
    prefix = f"{m.architecture}.rope.scaling."
    scaling = {k.removeprefix(prefix): v for k, v in m.file.metadata.items() if k.startswith(prefix)}
    kind = scaling.get("type", "linear" if "factor" in scaling else "none")
    if kind == "none":
        return out
    if kind not in ("linear", "yarn"):
        raise ValueError(f"unsupported {prefix}type={kind!r} (supported: none, linear, yarn)")
    for key, value in scaling.items():
        if key not in _SCALING_KNOWN and value != _SCALING_NEUTRAL.get(key):
            raise ValueError(f"unsupported {prefix}{key}={value!r}")
    out |= {"rope_type": kind, "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        out["original_max_position_embeddings"] = m.size("rope.scaling.original_context_length")
        out |= {theirs: scaling[ours] for ours, theirs in _YARN.items() if ours in scaling}
    return out


def _llama3(divisors: np.ndarray, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Llama 3's scaling from what each frequency is divided by; its parameters are those of all released models."""
    factor = round(float(divisors.max()), 4)
    known: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain = Rope(theta=theta, rotary_dim=rotary_dim)
    scaled = Rope(theta=theta, rotary_dim=rotary_dim, kind="llama3", factor=factor, original_max_seq_len=8192, **known)
    expected = inverse_frequencies(plain) / inverse_frequencies(scaled)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError("unsupported rope_freqs.weight: it is not Llama 3's scaling of an 8192-token context")
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192, **known}
