"""Tiny random models of every family, made by transformers: the oracle, without a download.

Their weights are larger than an untrained model's, and norms and biases random too, so that logits have real spread and a
misplaced tensor shows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MHA, MQA = {"num_key_value_heads": 6}, {"num_key_value_heads": 1}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GPT2 = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
NEOX = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
OPT = {k: v for k, v in NEOX.items() if k != "intermediate_size"} | {"ffn_dim": 64, "word_embed_proj_dim": 48}
GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 2.0, "original_max_position_embeddings": 32}

# name -> (class of the configuration, its fields)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", OPT),
    "opt-no-bias": ("OPTConfig", OPT | {"enable_bias": False, "activation_function": "gelu"}),
    "opt-untied": ("OPTConfig", OPT | UNTIED),
    "opt-350m": ("OPTConfig", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-final-norm": ("OPTConfig", OPT | {"_remove_final_layer_norm": True}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2-untied-relu": ("GPT2Config", GPT2 | UNTIED | {"n_inner": 80, "activation_function": "relu"}),
    "gpt2-unscaled": ("GPT2Config", GPT2 | {"scale_attn_weights": False}),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "gpt_neox-in-turn": ("GPTNeoXConfig", NEOX | {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "gpt_neox-no-bias-tied": ("GPTNeoXConfig", NEOX | TIED | {"attention_bias": False}),
    "gpt_neox-whole-rotary": ("GPTNeoXConfig", NEOX | rope("default", partial_rotary_factor=1.0)),
    "gpt_neox-linear": ("GPTNeoXConfig", NEOX | rope("linear", factor=3.0, partial_rotary_factor=0.5)),
    "llama": ("LlamaConfig", SIZES),
    "llama-mha-tied": ("LlamaConfig", SIZES | MHA | TIED),
    "llama-mqa": ("LlamaConfig", SIZES | MQA),
    "llama-biases": ("LlamaConfig", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("LlamaConfig", SIZES | {"head_dim": 16}),
    "llama-linear": ("LlamaConfig", SIZES | rope("linear", factor=2.5)),
    "llama-dynamic": ("LlamaConfig", SIZES | rope("dynamic", factor=2.0)),
    "llama-llama3": ("LlamaConfig", SIZES | rope("llama3", **LLAMA3)),
    "llama-yarn": ("LlamaConfig", SIZES | rope("yarn", **YARN)),
    "llama-yarn-mscale": ("LlamaConfig", SIZES | rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.3, beta_fast=8.0)),
    "llama-yarn-untruncated": ("LlamaConfig", SIZES | rope("yarn", **YARN, truncate=False, attention_factor=1.2)),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 7}),
    "mistral-no-window": ("MistralConfig", SIZES | MHA | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2-mqa-tied": ("Qwen2Config", SIZES | MQA | TIED),
    "qwen2-windows": ("Qwen2Config", SIZES | WINDOWED),
    "qwen2-yarn": ("Qwen2Config", SIZES | rope("yarn", **YARN)),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "qwen3-windows-biases-tied": ("Qwen3Config", SIZES | WINDOWED | TIED | {"head_dim": 8, "attention_bias": True}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma2-no-caps-mqa": ("Gemma2Config", GEMMA | MQA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-low-caps-untied": (
        "Gemma2Config",
        GEMMA | UNTIED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3TextConfig", GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3_text-linear": (
        "Gemma3TextConfig",
        GEMMA
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "final_logit_softcapping": 3.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "phi3": ("Phi3Config", SIZES | MHA | {"sliding_window": 7}),
    "phi3-gqa-partial-tied": ("Phi3Config", SIZES | TIED | rope("default", partial_rotary_factor=0.75)),
}
# One of each family, with what is particular to it.
FAMILIES = [
    "opt",
    "opt-350m",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2-windows",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
]


def tiny_config(case: str, **changes: Any) -> Any:
    import transformers

    name, fields = CASES[case]
    return getattr(transformers, name)(**(fields | changes))


def tiny_model(case: str, *, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, float32, in evaluation mode."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.set_num_threads(1)  # these matrices are too small to share out
    config = tiny_config(case, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    plus_one = config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                around_one = "norm" in name or "ln_" in name
                noise = 0.3 * noise + (1.0 if around_one and name.endswith("weight") and not plus_one else 0.0)
            else:
                fan_in = parameter.shape[0] if "c_" in name else parameter.shape[1]
                noise = noise * (1.5 / fan_in**0.5)
            parameter.copy_(noise)
    return model


def save_tiny(case: str, folder: Path, **options: Any) -> Any:
    """The same, saved in Hugging Face's form."""
    model = tiny_model(case)
    model.save_pretrained(folder, **options)
    return model


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], shape, dtype=np.int32)


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids).long(), use_cache=False).logits.numpy()
