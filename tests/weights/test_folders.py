"""Folders as they are: leftovers of other models, shards without an index, and what is no model says what it is."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny import save_model

import jaxkv.weights.saving
from jaxkv import Decoder
from jaxkv.config import ModelConfig, Rope
from jaxkv.weights import TokenizerWarning, load, save
from jaxkv.weights.loading import dtype_name, find

CONFIG = ModelConfig("llama", 97, 32, 4, 4, 2, 8, 40, 64, rope=Rope(rotary_dim=8))
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(Decoder(CONFIG, rngs=nnx.Rngs(0)), tmp_path / "model")
    return tmp_path / "model"


def logits(folder: Path) -> np.ndarray:
    return np.asarray(load(folder)[0](jnp.arange(6)[None]))


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_a_single_file_counts_before_the_index_of_an_earlier_model(folder: Path) -> None:
    """As transformers leaves them: the index names shards that are gone."""
    before = logits(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    np.testing.assert_array_equal(logits(folder), before)
    (folder / INDEX).write_text("{")
    np.testing.assert_array_equal(logits(folder), before)


def test_shards_need_no_index_if_all_are_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = logits(folder), load(folder)[0]
    monkeypatch.setattr(jaxkv.weights.saving, "SHARD_BYTES", 20_000)
    save(model, folder)
    (folder / INDEX).unlink()
    np.testing.assert_array_equal(logits(folder), before)
    first = sorted(folder.glob("model-*.safetensors"))[0]
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of its .* weight files: {first.name}"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapter_config.json", r"holds an adapter \(adapter_config\.json\), which must be merged .* merge_and_unload"),
        ("q4.gguf", r"holds GGUF files, give one of them instead of the folder: q4\.gguf"),
        ("pytorch_model.bin", r"has pytorch_model\.bin, which must be converted to safetensors first .*save_pretrained"),
        ("consolidated.safetensors", "consolidated.safetensors, Mistral's own form"),
        ("weights.safetensors", "weights.safetensors, which is no name"),
    ],
)
@pytest.mark.parametrize("with_config", [True, False])
def test_what_is_no_model_says_what_it_is(folder: Path, name: str, message: str, with_config: bool) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_text("{}")
    if not with_config:
        (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=message) as caught:
        load(folder)
    assert str(folder) in one_line(caught.value)


def test_a_model_of_the_hub_without_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="of a model on the hub only safetensors are fetched: download a GGUF file"):
        load(folder)


def renamed(folder: Path, rename) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(dict(rename(name, tensor) for name, tensor in tensors.items()), folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "language_model.", "base_model.model."])
def test_names_with_another_prefix_are_one_cause(folder: Path, prefix: str) -> None:
    renamed(folder, lambda name, tensor: (prefix + name, tensor))
    with pytest.raises(
        ValueError, match=rf"names begin with '{prefix}(model\.)?' where '(model\.)?' is expected \(\d+"
    ) as caught:
        load(folder)
    assert len(one_line(caught.value)) < 400


@pytest.mark.parametrize("suffix", [".qweight", ".weight_packed", ".weight.absmax", ".weight_scale_inv", ".W_q"])
def test_a_foreign_quantization_is_one_cause(folder: Path, suffix: str) -> None:
    def rename(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
        return (name.replace(".weight", suffix), tensor.astype(np.int8)) if "_proj" in name else (name, tensor)

    renamed(folder, rename)
    with pytest.raises(
        ValueError, match=rf"is quantized \(28 tensors such as .*{suffix}\), which is not supported: take"
    ) as caught:
        load(folder)
    one_line(caught.value)


def test_many_faults_are_counted_and_the_first_shown(folder: Path) -> None:
    renamed(folder, lambda name, tensor: (f"x{hash(name) % 97}.{len(name)}.{name.replace('.', '_')}", tensor))
    with pytest.raises(ValueError, match=r"\(78 faults\): missing .*; and 70 more") as caught:
        load(folder)
    assert len(one_line(caught.value)) < 900


@pytest.mark.parametrize("spelling", ["bfloat16", "bf16", "torch.bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_spellings_of_a_dtype(spelling: object) -> None:
    assert dtype_name(spelling) == "bfloat16"
    assert dtype_name("half") == dtype_name("torch.float16") == "float16"
    assert dtype_name("auto") is dtype_name(None) is None


@pytest.mark.torch
def test_dtypes_of_torch() -> None:
    import torch

    assert [dtype_name(d) for d in (torch.float32, torch.bfloat16, torch.float16)] == ["float32", "bfloat16", "float16"]
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch\.int8"):
        dtype_name(torch.int8)


@pytest.mark.parametrize("wrong", ["int8", 7, "", [], "float64"])
def test_what_is_no_dtype_for_a_model(wrong: object) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        dtype_name(wrong)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bf16", "auto", None, 16, {"a": 1}, "int3"])
@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_the_dtype_in_a_configuration_is_not_read(folder: Path, field: str, dtype: object) -> None:
    """The files' own dtype counts; once a spelling that transformers does not know failed the load."""
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("dtype")
    (folder / "config.json").write_text(json.dumps(fields | {field: dtype}))
    assert load(folder)[0].config.dtype == "float32"


TOKENIZERS = {
    "cut off": ({"tokenizer.json": '{"version": "1.0", "tru'}, r"tokenizer\.json is not valid JSON"),
    "empty": ({"tokenizer.json": ""}, r"tokenizer\.json is empty"),
    "a pointer": ({"tokenizer.json": "version https://git-lfs.github.com/spec/v1"}, r"tokenizer\.json is not valid JSON"),
    "no content": ({"tokenizer.json": "{}"}, r"tokenizer\.json cannot be read"),
    "settings alone": (
        {"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
        r"tokenizer_config\.json makes a tokenizer without words, and there is no tokenizer\.json or tokenizer\.model beside it",
    ),
    "settings of a wrong type": ({"tokenizer_config.json": '{"tokenizer_class": 7}'}, r"tokenizer_config\.json cannot be read"),
    "a list": ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json holds list, expected an object"),
    "an unknown class": ({"tokenizer_config.json": '{"tokenizer_class": "NoSuch"}'}, r"tokenizer_config\.json cannot be read"),
    "custom code": (
        {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["t.T", null]}}'},
        r"tokenizer_config\.json asks for code of its own \(auto_map\), which is not run",
    ),
    "no SentencePiece model": ({"tokenizer.model": "garbage"}, r"tokenizer\.model cannot be read"),
    "no vocabulary": ({"vocab.json": "{}"}, r"vocab\.json cannot be read"),
    "tekken": ({"tekken.json": "{}"}, r"tekken\.json cannot be read"),
}


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_used_is_named_and_the_weights_are_there(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files, message = TOKENIZERS[name]
    for file, content in files.items():
        (folder / file).write_text(content)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on stdin"))
    with pytest.warns(TokenizerWarning, match=message) as caught:
        model, tokenizer = load(folder)
    assert tokenizer is None
    assert len(jax.tree.leaves(model)) > 0
    (warning,) = [w for w in caught if w.category is TokenizerWarning]
    assert str(folder) in one_line(warning.message)  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""


def test_a_sentencepiece_model_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.model").write_text("anything")
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'sentencepiece' else real(name, package)\n"
        "sys.modules['sentencepiece'] = None\n"
        "import jaxkv\n"
        f"print(jaxkv.load({str(folder)!r})[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
    assert "tokenizer.model needs the package sentencepiece (pip install sentencepiece)" in done.stderr


def test_a_good_tokenizer_still_comes_along(tmp_path: Path) -> None:
    assert load(save_model(tmp_path / "m"))[1]("ab")["input_ids"]


@pytest.mark.parametrize("wrong", [None, "", 3])
def test_what_is_no_name_of_a_model(wrong: object) -> None:
    """None was a TypeError of the standard library's, "" an empty message."""
    with pytest.raises(ValueError, match="name_or_path must be a hub id, a folder or a .gguf file, got"):
        find(wrong)


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find(f"~/{folder.name}") == folder
