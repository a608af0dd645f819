"""GGUF files of every supported architecture, written as llama.cpp's converter writes them, against transformers."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from families.tiny_models import FAMILIES, LLAMA3, rope, tiny_model, tokens, torch_logits
from gguf import GGMLQuantizationType
from gguf_writing import quantize_in_place, write_gguf

from jaxkv.config import Rope
from jaxkv.model.rotary import inverse_frequencies
from jaxkv.weights import load, save

pytestmark = pytest.mark.torch

# Gemma's query scaling is not in the file: all but the 27B models have head_dim.
PLAIN_GEMMA = {"query_pre_attn_scalar": 16}
CASES = {
    "llama": {},
    "llama-biases": {},
    "llama-mqa": {"tie_word_embeddings": True},
    "llama-wide-heads": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": PLAIN_GEMMA,
    "gemma3_text": PLAIN_GEMMA,
    "phi3": {},
    "phi3-gqa-partial-tied": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_neox-in-turn": {"hidden_act": "gelu"},
}


def assert_same_logits(path: Path, oracle, atol: float = 2e-4) -> None:
    ids = tokens(2, 24)
    expected = torch_logits(oracle, ids)
    assert expected.std() > 0.5
    model, _ = load(path)
    assert model.config.dtype == "float32"
    np.testing.assert_allclose(model(jnp.asarray(ids)), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    oracle = tiny_model(case, **CASES[case])
    write_gguf(tmp_path / "tiny.gguf", oracle)
    assert_same_logits(tmp_path / "tiny.gguf", oracle)


@pytest.mark.parametrize("case", ["llama-mqa", "gemma3_text", "gpt2", "gpt_neox"])
def test_a_gguf_model_is_saved_in_hugging_faces_form(case: str, tmp_path: Path) -> None:
    import transformers

    oracle = tiny_model(case, **CASES[case])
    write_gguf(tmp_path / "tiny.gguf", oracle)
    model, _ = load(tmp_path / "tiny.gguf")
    save(model, tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    ids = tokens(2, 24)
    np.testing.assert_allclose(torch_logits(again, ids), torch_logits(oracle, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_files(kind: str, tmp_path: Path) -> None:
    oracle = tiny_model("llama", hidden_size=64, num_attention_heads=4, intermediate_size=96)
    write_gguf(tmp_path / "tiny.gguf", oracle, kind=GGMLQuantizationType[kind])
    quantize_in_place(oracle, GGMLQuantizationType[kind])
    assert_same_logits(tmp_path / "tiny.gguf", oracle)


def test_quantized_transposed_and_reordered_tensors(tmp_path: Path) -> None:
    for case in ("gpt2", "gpt_neox"):
        sizes = {"n_embd": 64, "n_head": 4} if case == "gpt2" else {"hidden_size": 64, "num_attention_heads": 4}
        oracle = tiny_model(case, **sizes)
        write_gguf(tmp_path / f"{case}.gguf", oracle, kind=GGMLQuantizationType.Q8_0)
        quantize_in_place(oracle, GGMLQuantizationType.Q8_0)
        assert_same_logits(tmp_path / f"{case}.gguf", oracle)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    scaling = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    oracle = tiny_model("llama", max_position_embeddings=16384, **rope("llama3", **scaling))
    plain = Rope(theta=500_000.0, rotary_dim=8)
    scaled = Rope(theta=500_000.0, rotary_dim=8, kind="llama3", factor=32.0, original_max_seq_len=8192)
    divisors = inverse_frequencies(plain) / inverse_frequencies(scaled)
    write_gguf(tmp_path / "tiny.gguf", oracle, tensors={"rope_freqs.weight": divisors})
    assert_same_logits(tmp_path / "tiny.gguf", oracle)

    divisors[1] *= 1.5
    write_gguf(tmp_path / "odd.gguf", oracle, tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match=r"odd\.gguf: unsupported rope_freqs\.weight"):
        load(tmp_path / "odd.gguf")


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    oracle = tiny_model("llama-linear")
    extra = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}
    write_gguf(tmp_path / "linear.gguf", oracle, extra=extra)
    assert_same_logits(tmp_path / "linear.gguf", oracle)

    oracle = tiny_model("qwen2-yarn")
    extra = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.original_context_length": 32}
    write_gguf(tmp_path / "yarn.gguf", oracle, extra=extra)
    assert_same_logits(tmp_path / "yarn.gguf", oracle)


@pytest.mark.parametrize(
    ("extra", "tensors", "message"),
    [
        ({"expert_count": 8}, {}, r"unsupported llama\.expert_count=8"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            {},
            r"unsupported llama\.rope\.scaling\.type='longrope'",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 1.5},
            {},
            r"unsupported llama\.rope\.scaling\.attn_factor=1\.5",
        ),
        ({"attention.value_length": 4}, {}, r"unsupported value_length=4 with key_length=8"),
        ({"attention.head_count_kv": [2, 2, 1]}, {}, r"unsupported llama\.attention\.head_count_kv=\[2, 2, 1\]"),
        ({}, {"rope_factors_long.weight": np.ones(4, np.float32)}, r"unsupported rope scaling 'longrope'"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, 48), np.float32)}, r"unknown tensor blk\.0\.ffn_gate_inp\.weight"),
        ({"feed_forward_length": 60}, {}, r"blk\.0\.ffn_down\.weight has shape \[48, 64\], expected \[48, 60\]"),
        ({"block_count": 4}, {}, r"missing blk\.3\.attn_k\.weight \[16, 48\]"),
    ],
)
def test_what_is_not_supported_is_named(extra: dict, tensors: dict, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra=extra, tensors=tensors)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "tiny.gguf")
    assert "tiny.gguf" in str(caught.value)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"odd\.gguf: unknown GGUF architecture 'mamba'"):
        load(tmp_path / "odd.gguf")


def test_every_gguf_family_is_covered() -> None:
    from jaxkv.weights.gguf_config import FAMILY_OF_ARCHITECTURE

    assert {case.split("-")[0] for case in CASES} == set(FAMILY_OF_ARCHITECTURE.values())
    assert set(FAMILY_OF_ARCHITECTURE.values()) | {"opt", "mistral"} == {name.split("-")[0] for name in FAMILIES}
