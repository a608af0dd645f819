"""GGUF files as they are found: in parts, with a tokenizer that nobody here knows, with entries of a wrong kind."""

import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_writing import add_entry, finish

from jaxkv.cli.main import main
from jaxkv.weights import TokenizerWarning, load
from jaxkv.weights.gguf_file import GGUFFile, open_gguf

METADATA: dict[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": 16,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 24,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
SHAPES = {
    "token_embd.weight": (20, 16),
    "output_norm.weight": (16,),
    "blk.0.attn_norm.weight": (16,),
    "blk.0.ffn_norm.weight": (16,),
    "blk.0.attn_q.weight": (16, 16),
    "blk.0.attn_k.weight": (8, 16),
    "blk.0.attn_v.weight": (8, 16),
    "blk.0.attn_output.weight": (16, 16),
    "blk.0.ffn_gate.weight": (24, 16),
    "blk.0.ffn_up.weight": (24, 16),
    "blk.0.ffn_down.weight": (16, 24),
}
TENSORS = {n: np.random.default_rng(i).normal(size=s).astype(np.float32) for i, (n, s) in enumerate(SHAPES.items())}


def write(path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (METADATA if metadata is None else metadata).items():
        if key.startswith("split.tensors"):
            writer.add_int32(key, value)
        elif key.startswith("split."):
            writer.add_uint16(key, value)
        else:
            add_entry(writer, key, value)
    for name, tensor in (TENSORS if tensors is None else tensors).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def split(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """The model in parts, as llama.cpp's gguf-split writes them: the metadata in the first, tensors in all but that."""
    names, paths = list(TENSORS), []
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(TENSORS)} | changes.get(f"part{number}", {})
        mine = names[(number - 1) :: count - 1] if number else []
        path = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write(path, own | (METADATA if number == 0 else {}), {n: TENSORS[n] for n in mine}))
    return paths


def logits(path: Path) -> np.ndarray:
    return np.asarray(load(path)[0](jnp.arange(5)[None]))


def test_parts_are_one_model_whichever_is_given(tmp_path: Path) -> None:
    expected = logits(write(tmp_path / "whole.gguf"))
    for path in split(tmp_path):
        np.testing.assert_array_equal(logits(path), expected)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"is one of 3 parts, and 1 are missing: model-00002-of-00003\.gguf"):
        load(paths[0])


def test_parts_must_keep_their_names_and_fit_together(tmp_path: Path) -> None:
    paths = split(tmp_path)
    shutil.copy(paths[0], tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match=r"is one of 3 parts: name them NAME-00001-of-00003\.gguf and so on"):
        load(tmp_path / "renamed.gguf")
    shutil.copy(paths[1], paths[2])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.gguf says that it is part 1, expected 2"):
        load(paths[0])
    split(tmp_path, part0={"split.tensors.count": 99})
    with pytest.raises(ValueError, match=r"3 parts hold 11 tensors, expected 99 \(split\.tensors\.count\)"):
        load(paths[0])


def vocabulary(**changes: Any) -> dict[str, Any]:
    tokens = ["t0", "t1", "t0t1", *(f"t{i}" for i in range(3, 20))]
    entries = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "token_type": [1] * 20, "merges": ["t0 t1"]} | changes
    return METADATA | {f"tokenizer.ggml.{k}": v for k, v in entries.items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["a b"]}, "the merge 'a b' of tokenizer.ggml.merges is not in its vocabulary"),
        ({"pre": "of-next-year"}, "unsupported tokenizer.ggml.pre='of-next-year'"),
        ({"model": "rwkv"}, "unsupported tokenizer.ggml.model='rwkv'"),
        ({"model": None}, "unsupported tokenizer.ggml.model=None"),
        ({"merges": None}, "incomplete tokenizer: KeyError"),
        ({"eos_token_id": 777}, "incomplete tokenizer: IndexError"),
        ({"tokens": 7}, "incomplete tokenizer: TypeError"),
        ({"merges": [1, 2]}, "incomplete tokenizer: AttributeError"),
        ({"pre": [1]}, "incomplete tokenizer: TypeError"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 20 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_does_not_block_the_weights(
    changes: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = logits(write(tmp_path / "plain.gguf"))
    path = write(tmp_path / "odd.gguf", vocabulary(**changes))
    with pytest.warns(TokenizerWarning, match=r"no tokenizer: .*odd\.gguf") as caught:
        model, tokenizer = load(path)
    assert tokenizer is None
    assert message in str(caught[0].message)
    np.testing.assert_array_equal(model(jnp.arange(5)[None]), expected)
    assert main(["generate", "Hi", "--model", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


WRONG = [0, -1, 2**31 - 1, 1.5, "x", True, [1, 2], ["a"], float("nan")]


def check(path: Path, key: str, metadata: dict[str, Any]) -> None:
    write(path, metadata)
    try:
        load(path)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert str(path) in message, message
    except TokenizerWarning:
        assert key.startswith("tokenizer")


@pytest.mark.parametrize("count", [30, pytest.param(None, marks=pytest.mark.slow)])
def test_entries_that_are_missing_or_of_a_wrong_kind(count: int | None, tmp_path: Path) -> None:
    everything = vocabulary() | {
        "llama.rope.dimension_count": 4,
        "llama.attention.key_length": 4,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "llama.expert_count": 0,
        "general.alignment": 32,
    }
    cases = [(k, {n: v for n, v in everything.items() if n != k}) for k in everything]
    cases += [(k, everything | {k: w}) for k in everything for w in WRONG if not (isinstance(w, int) and w == -1)]
    for key, metadata in cases if count is None else random.Random(0).sample(cases, count):
        check(tmp_path / "odd.gguf", key, metadata)


def test_one_file_is_no_part(tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", METADATA | {"split.no": 0, "split.count": 1})
    assert open_gguf(path).tensors.keys() == GGUFFile(path).tensors.keys()
