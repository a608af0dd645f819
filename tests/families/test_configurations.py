"""Configurations: old and new spellings are read alike, and what would change the mathematics is refused by name."""

import dataclasses
from typing import Any

import pytest
from families.tiny_models import CASES, FAMILIES, tiny_config

from jaxkv.config import ModelConfig, Rope
from jaxkv.families import from_hf, to_hf

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 128}


def changed(model_type: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type} | fields


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_survives_the_way_there_and_back(case: str) -> None:
    config = from_hf(tiny_config(case).to_dict())
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed("mamba"), "unknown model_type 'mamba'; the supported families are gemma2"),
        ({"hidden_size": 64}, "unknown model_type None"),
        (changed("llama", hidden_act="mish"), "unsupported hidden_act='mish'"),
        (changed("llama", quantization_config={"quant_method": "awq"}), "unsupported quantization_config="),
        (changed("llama", num_local_experts=8), "unsupported num_local_experts=8"),
        (changed("llama", sliding_window=32), "unsupported sliding_window=32"),
        (changed("llama", rope_scaling={"type": "linear", "factor": 0.5}), "rope factor must be >= 1, got 0.5"),
        (changed("llama", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (changed("qwen2", rope_parameters={"rope_theta": 1e4, "mrope_section": [4, 2, 2]}), r"mrope_section=\[4, 2, 2\]"),
        (changed("qwen2", layer_types=["full_attention", "chunked_attention"]), r"layer_types\[1\]='chunked_attention'"),
        (changed("mistral", layer_types=["full_attention", "sliding_attention"]), "unsupported layer_types="),
        (changed("gpt2", scale_attn_by_inverse_layer_idx=True), "unsupported scale_attn_by_inverse_layer_idx=True"),
        (changed("gpt2", add_cross_attention=True), "unsupported add_cross_attention=True"),
        (changed("opt", layer_norm_elementwise_affine=False), "unsupported layer_norm_elementwise_affine=False"),
        (changed("gemma2", use_bidirectional_attention=True), "unsupported use_bidirectional_attention=True"),
        (
            changed(
                "phi3",
                rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                original_max_position_embeddings=64,
                pad_token_id=0,
            ),
            "unsupported rope_type='longrope'",
        ),
        (changed("llama", hidden_size=65), "not a valid llama configuration"),
        (changed("llama", num_key_value_heads=3), "num_attention_heads=4, which is no multiple of num_key_value_heads=3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(fields)


def test_all_unsupported_fields_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_experts=4.*add_cross_attention=True.*scale_attn_by_inverse_layer_idx=True"):
        from_hf(changed("gpt2", num_experts=4, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True))


def test_old_spellings_of_rotary_parameters() -> None:
    linear = from_hf(LLAMA | {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope == Rope(theta=5e4, rotary_dim=16, kind="linear", factor=4.0)
    assert linear.max_seq_len == 512, "linear scaling multiplies the trained length"

    pythia = from_hf(LLAMA | {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 2e4})
    assert pythia.rope == Rope(theta=2e4, rotary_dim=4)

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"original_max_position_embeddings": 32}})
    assert llama3.rope == Rope(theta=5e5, rotary_dim=16, kind="llama3", factor=8.0, original_max_seq_len=32)
    assert llama3.max_seq_len == 128, "Llama 3 states the extended length"

    qwen = from_hf(changed("qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}))
    assert qwen.max_seq_len == 512, "Qwen states the trained length"

    gemma = changed("gemma3_text", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window=32)
    gemma = from_hf(gemma | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert gemma.rope == Rope(theta=1e6, rotary_dim=16, kind="linear", factor=8.0)
    assert gemma.local_rope == Rope(theta=1e4, rotary_dim=16)
    assert gemma.windows == (32,) * 5 + (None, 32)
    assert gemma.max_seq_len == 128


def test_end_tokens_are_kept() -> None:
    config = from_hf(LLAMA | {"eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": None})
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2, 7), None)
    assert to_hf(config)["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"qk_norm": True}, "a llama configuration cannot express qk_norm=True"),
        ("llama", {"qkv_bias": True}, "cannot express qkv_bias=True, out_bias=False|cannot express out_bias=False"),
        ("mistral", {"windows": (7, None, 7)}, r"cannot express windows=\(7, None, 7\)"),
        ("gpt2", {"positions": "rotary", "rope": Rope(rotary_dim=8)}, "cannot express positions='rotary', rope="),
        ("gemma2", {"embed_scale": 1.0, "logits_soft_cap": None}, "cannot express embed_scale=1.0$"),
        ("llama", {"family": "mamba"}, "unknown model_type 'mamba'"),
    ],
)
def test_a_model_its_family_cannot_express_is_not_written(case: str, changes: dict, message: str) -> None:
    config = dataclasses.replace(from_hf(tiny_config(case).to_dict()), **changes)
    with pytest.raises(ValueError, match=message):
        to_hf(config)


def test_families_are_those_of_the_table() -> None:
    from jaxkv.families import FAMILIES as known

    assert {name.split("-")[0] for name in FAMILIES} == set(known)
    assert all(isinstance(from_hf(tiny_config(name).to_dict()), ModelConfig) for name in FAMILIES)
