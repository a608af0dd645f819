"""What the families' configurations have in common: transformers' fields turned into ours and back."""

from collections.abc import Mapping
from typing import Any

from jaxkv.config import Activation, ModelConfig

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
HF_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

# Fields of any configuration that change the mathematics in ways no family here knows, and the values that do not.
_EVERYWHERE: dict[str, tuple] = {
    "quantization_config": (None,),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0, 1),
    "moe_num_experts": (None, 0, 1),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "chunk_size_feed_forward": (None, 0),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False),
    "logit_scale": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
}
REFUSED = frozenset(_EVERYWHERE)
"""Fields that are looked at for every family."""


def refuse(hf: Any, allowed: Mapping[str, tuple]) -> None:
    """Raise if a field of a configuration has a value that is not supported.

    Args:
      hf: a transformers configuration.
      allowed: field -> supported values; a field the configuration lacks counts as None. The fields no family supports
        are checked as well.

    Raises:
      ValueError: names every such field with its value, and the supported values.
    """
    found = []
    for field, values in {**_EVERYWHERE, **allowed}.items():
        value = getattr(hf, field, None)
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            supported = " or ".join(repr(v) for v in values if v is not None or len(values) == 1)
            found.append(f"{field}={value!r} (supported: {supported})")
    if found:
        raise ValueError(f"{hf.model_type} configuration with unsupported {', '.join(found)}")


def activation(hf: Any, field: str) -> Activation:
    """Our name of the activation in `field`.

    Raises:
      ValueError: it is none of ours.
    """
    value = getattr(hf, field)
    if value not in ACTIVATIONS:
        raise ValueError(f"{hf.model_type} configuration with unsupported {field}={value!r}; known: {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def head_width(hf: Any, hidden: str, heads: str) -> int:
    """Width of a head in families whose heads fill the hidden width.

    Raises:
      ValueError: the heads do not share the hidden width evenly.
    """
    width, count = getattr(hf, hidden), getattr(hf, heads)
    if width % count:
        raise ValueError(f"{hf.model_type} configuration with {hidden}={width}, which is no multiple of {heads}={count}")
    return width // count


def token_ids(hf: Any) -> dict[str, Any]:
    """The begin, end and padding tokens."""
    eos = hf.eos_token_id
    ends = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return {"bos_token_id": hf.bos_token_id, "eos_token_ids": ends, "pad_token_id": hf.pad_token_id}


def write_token_ids(c: ModelConfig) -> dict[str, Any]:
    """The inverse of `token_ids`."""
    eos = None if not c.eos_token_ids else c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids)
    return {"bos_token_id": c.bos_token_id, "eos_token_id": eos, "pad_token_id": c.pad_token_id}


def llama_fields(hf: Any, act: str = "hidden_act") -> dict[str, Any]:
    """The fields of all families that take after Llama: RMS norms, rotary positions, a gated MLP."""
    # These families' heads need not fill the hidden width: transformers rounds down, too.
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim < 1:
        raise ValueError(
            f"{hf.model_type} configuration with hidden_size={hf.hidden_size} below num_attention_heads={hf.num_attention_heads}"
        )
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ValueError(
            f"{hf.model_type} configuration with num_attention_heads={hf.num_attention_heads}, which is no multiple of "
            f"num_key_value_heads={hf.num_key_value_heads}"
        )
    return {
        "family": hf.model_type,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": hf.intermediate_size,
        "max_seq_len": hf.max_position_embeddings,
        "norm_eps": hf.rms_norm_eps,
        "activation": activation(hf, act),
        "tie_embeddings": bool(hf.tie_word_embeddings),
        **token_ids(hf),
    }


def write_llama_fields(c: ModelConfig, act: str = "hidden_act") -> dict[str, Any]:
    """The inverse of `llama_fields`."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_seq_len,
        "rms_norm_eps": c.norm_eps,
        act: HF_ACTIVATIONS[c.activation],
        "tie_word_embeddings": c.tie_embeddings,
        **write_token_ids(c),
    }


def layer_windows(hf: Any) -> tuple[int | None, ...]:
    """Sliding windows from `layer_types`; () when no layer has one.

    Raises:
      ValueError: a layer type that is not supported.
    """
    types = {"full_attention": None, "sliding_attention": hf.sliding_window}
    for layer, kind in enumerate(hf.layer_types):
        if not isinstance(kind, str) or kind not in types:
            raise ValueError(f"{hf.model_type} configuration with unsupported layer_types[{layer}]={kind!r}")
        if kind == "sliding_attention" and hf.sliding_window is None:
            raise ValueError(
                f"{hf.model_type} configuration with layer_types[{layer}]={kind!r}, but no sliding_window, or with "
                "use_sliding_window=False"
            )
    windows = tuple(types[kind] for kind in hf.layer_types)
    return windows if any(windows) else ()


def write_layer_windows(c: ModelConfig) -> dict[str, Any]:
    """The inverse of `layer_windows`; windows of different widths are lost, which the round trip of `to_hf` reports."""
    kinds = ["full_attention" if c.window(i) is None else "sliding_attention" for i in range(c.num_layers)]
    widths = [w for w in c.windows if w is not None]
    return {"layer_types": kinds, "sliding_window": widths[0] if widths else None}


def one_window(hf: Any) -> tuple[int | None, ...]:
    """The same sliding window in every layer, or ()."""
    return () if hf.sliding_window is None else (hf.sliding_window,) * hf.num_hidden_layers
