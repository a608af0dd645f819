"""Safetensors: the tensors of a Hugging Face folder, in one file or in shards; and a writer that streams."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.families import Family

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {name: code for code, name in _NAMES.items()}


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of too many digits, nested too deep
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, expected an object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    A single file counts before an index: transformers leaves the index of a sharded model behind when a smaller one is saved over
    it. Shards that are complete need no index.

    Raises:
      FileNotFoundError: there are none, or some of the shards are missing.
      ValueError: the index is broken.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        files = _shards(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} of its {len(files)} weight files: {', '.join(missing)}")
    if not files:
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{what_else(folder)}")
    return files


def _shards(folder: Path) -> list[Path]:
    """All shards that there must be, by the name of any of them: model-00001-of-00003.safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        if found := re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", path.name):
            start, _, count = found.groups()
            return [folder / f"{start}{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    return []


def what_else(folder: Path) -> str:
    """What a folder that holds no model holds instead, and the way out; "" where nothing is known about it."""

    def names(*patterns: str) -> str:
        return ", ".join(sorted(p.name for pattern in patterns for p in folder.glob(pattern)))

    if names("adapter_config.json", "adapter_model.*"):
        return (
            f"; it holds an adapter ({names('adapter_config.json', 'adapter_model.*')}), which must be merged into its base model "
            "first (in peft: merge_and_unload, then save_pretrained)"
        )
    if found := names("*.gguf"):
        return f"; it holds GGUF files, give one of them instead of the folder: {found}"
    if found := names("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5"):
        return (
            f"; it has {found}, which must be converted to safetensors first (where torch is: "
            "transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder))"
        )
    if found := names("consolidated*.safetensors"):
        return f"; it has {found}, Mistral's own form: take the files of the model's form for transformers"
    if found := names("*.safetensors"):
        return f"; it has {found}, which is no name of a model's weights"
    if folder.parent.name == "snapshots":  # how the hub's cache is laid out
        return "; of a model on the hub only safetensors are fetched: download a GGUF file by hand, and give its path"
    return ""


class SafetensorsSource:
    """The tensors of a model folder, see `jaxkv.weights.source.Source`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is no safetensors file, or is truncated; or two hold the same tensor.
    """

    def __init__(self, folder: Path, family: Family):
        self.where, self.harmless = str(folder), family.harmless
        self._family = family
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="numpy") as file:
                    for name in file.keys():  # noqa: SIM118, it is no dict
                        entry = file.get_slice(name)
                        if name in self._files:
                            raise ValueError(f"{path} and {self._files[name]} both hold the tensor {name}")
                        self._files[name] = path
                        code = str(entry.get_dtype())
                        self.tensors[name] = (tuple(entry.get_shape()), _NAMES.get(code, code))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file: {error}") from error

    def spellings(self, name: str) -> Sequence[str]:
        """The table's name, its older forms, and the one a bare model's file has."""
        older = [theirs for theirs, ours in self._family.aliases if ours == name]
        return [name, *older, *([name.removeprefix(self._family.prefix)] if name.startswith(self._family.prefix) else [])]

    def read(self, name: str) -> np.ndarray:
        """The tensor; the file is opened for each, so that none of its pages stay mapped."""
        with safe_open(self._files[name], framework="numpy") as file:
            return file.get_tensor(name)


def write_safetensors(path: Path, entries: Iterable[tuple[str, tuple[int, ...], str]], read: Callable) -> None:
    """Write a safetensors file tensor by tensor.

    Args:
      path: file to write.
      entries: name, shape and dtype of each tensor, in order.
      read: name -> the tensor, an array of that shape and dtype; called once each, in order.
    """
    entries = list(entries)
    header: dict[str, Mapping] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, shape, dtype in entries:
        begin, end = end, end + np.dtype(dtype).itemsize * int(np.prod(shape))
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype in entries:
            tensor = np.ascontiguousarray(read(name))
            assert (tensor.shape, tensor.dtype.name) == (tuple(shape), dtype), (name, tensor.shape, tensor.dtype)
            file.write(tensor.reshape(-1).view(np.uint8).data)
