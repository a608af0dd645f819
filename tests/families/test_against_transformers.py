"""Every family against transformers: the same logits from the same files, and the same files back."""

from pathlib import Path

import jax
import numpy as np
import pytest
from families.tiny_models import CASES, save_tiny, tiny_model, tokens, torch_logits

import jaxkv
from jaxkv.weights import load, save

pytestmark = pytest.mark.torch


def logits(model: jaxkv.Decoder, ids: np.ndarray) -> jax.Array:
    """As one program: operation by operation there are more to compile."""
    return jax.jit(lambda model, ids: model(ids))(model, ids)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_saved_tensors_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    import torch
    import transformers

    oracle = save_tiny(case, tmp_path / "theirs")
    ids = tokens(2, 24)
    expected = torch_logits(oracle, ids)
    assert expected.std() > 0.5, "logits without spread would hide a misplaced tensor"

    model, tokenizer = load(tmp_path / "theirs")
    assert tokenizer is None
    np.testing.assert_allclose(logits(model, ids), expected, atol=2e-4, rtol=0)

    save(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(oracle)
    before, after = oracle.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert not different
    np.testing.assert_allclose(torch_logits(again, ids), expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_dynamic_scaling_beyond_the_trained_length_is_that_of_decoding_token_by_token(tmp_path: Path) -> None:
    import torch

    oracle = save_tiny("llama-dynamic", tmp_path)
    ids = tokens(1, 100)
    model, _ = load(tmp_path)
    assert model.config.max_seq_len == 128, "factor 2 on 64 trained tokens"
    cache, rows = None, []
    with torch.no_grad():
        for i in range(ids.shape[1]):
            out = oracle(torch.from_numpy(ids[:, i : i + 1]).long(), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[:, 0].numpy())
    np.testing.assert_allclose(logits(model, ids), np.stack(rows, axis=1), atol=2e-4, rtol=0)


def test_files_of_the_bare_model_load_too(tmp_path: Path) -> None:
    """GPT-2's own files on the hub name their tensors without "transformer."."""
    oracle = tiny_model("gpt2")
    oracle.transformer.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    model, _ = load(tmp_path)
    np.testing.assert_allclose(logits(model, ids), torch_logits(oracle, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_shards_and_saved_shards(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    oracle = save_tiny(case, tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ids = tokens(1, 9)
    model, _ = load(tmp_path / "theirs")
    np.testing.assert_allclose(logits(model, ids), torch_logits(oracle, ids), atol=2e-4, rtol=0)

    monkeypatch.setattr("jaxkv.weights.saving.SHARD_BYTES", 40_000)
    save(model, tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_allclose(torch_logits(again, ids), torch_logits(oracle, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_keep_their_dtype_and_bits(dtype: str, tmp_path: Path) -> None:
    import torch

    oracle = tiny_model("llama").to(getattr(torch, dtype))
    oracle.save_pretrained(tmp_path / "theirs")
    model, _ = load(tmp_path / "theirs")
    assert model.config.dtype == dtype
    stored = oracle.lm_head.weight.detach().float().numpy()
    np.testing.assert_array_equal(np.asarray(model.lm_head.get_value(), np.float32), stored)
    save(model, tmp_path / "ours")
    again, _ = load(tmp_path / "ours", dtype="float32")
    assert again.config.dtype == "float32"
    np.testing.assert_array_equal(np.asarray(again.lm_head.get_value()), stored)
