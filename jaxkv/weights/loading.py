"""`jaxkv.load`: from a name or path to a decoder and its tokenizer."""

import os
import re
from pathlib import Path
from typing import Any

import jax

from jaxkv.config import ModelConfig
from jaxkv.families import family_of, from_hf
from jaxkv.families.hf import transformers
from jaxkv.model.decoder import Decoder
from jaxkv.weights.assemble import assemble
from jaxkv.weights.default_model import ALIASES, default_model_path
from jaxkv.weights.gguf_file import GGUFFile
from jaxkv.weights.gguf_model import GGUFSource, read_fields
from jaxkv.weights.gguf_tokenizer import build_tokenizer
from jaxkv.weights.hub import download_folder
from jaxkv.weights.safetensors_file import SafetensorsSource, read_json

_DTYPES = ("float32", "bfloat16", "float16")
_HUB_ID = r"[\w.-]+(/[\w.-]+)?"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load(name_or_path: str | os.PathLike, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None) -> tuple[Decoder, Any]:
    """Load a model and its tokenizer, without torch.

    Args:
      name_or_path: a model id of the hub; a Hugging Face folder with safetensors; a `.gguf` file; or "default" (also
        "smollm2-135m-instruct"), a small instruct model that is fetched once and kept in the user's cache folder.
      dtype: of the parameters, "float32", "bfloat16" or "float16" (or the same as a JAX dtype); None keeps the file's, and
        float32 for GGUF.
      mesh: devices to spread the parameters over, with an axis "tensor"; None is the default device.

    Returns:
      The decoder, and a transformers tokenizer, or None where the files hold none.

    Raises:
      FileNotFoundError: no such file or folder, or a file in it is missing.
      ValueError: a broken file, an unknown family, a configuration that is not supported, tensors that do not fit; the
        message names the file and the value. Nothing has been built then.
      ConnectionError: the hub or the package index cannot be reached.
    """
    if dtype is not None:
        dtype = dtype if isinstance(dtype, str) else jax.numpy.dtype(dtype).name
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {_DTYPES} or None, got {dtype!r}")
    path = find(name_or_path)
    if path.is_dir():
        return _load_folder(path, dtype, mesh)
    return _load_gguf(path, dtype, mesh)


def find(name_or_path: str | os.PathLike) -> Path:
    """The folder or GGUF file of a model, fetched if it must be.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as `load`.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path)
    if name in ALIASES:
        return default_model_path()
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"{path} is a weight file; give its folder, which also holds config.json")
        return path
    looks_local = path.suffix in (".gguf", ".safetensors") or path.is_absolute() or name.startswith((".", "~"))
    if looks_local or not re.fullmatch(_HUB_ID, name):
        raise FileNotFoundError(f"no such file or folder: {name}")
    return download_folder(name)


def load_config(name_or_path: str | os.PathLike) -> ModelConfig:
    """The configuration alone, without reading weights.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as `load`.
    """
    path = find(name_or_path)
    return _folder_config(path) if path.is_dir() else _gguf_config(GGUFFile(path))


def _folder_config(folder: Path) -> ModelConfig:
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():  # its token ids are those that generation uses
        ids = read_json(generation)
        fields |= {k: ids[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if ids.get(k) is not None}
    try:
        return from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def _load_folder(folder: Path, dtype: str | None, mesh: jax.sharding.Mesh | None) -> tuple[Decoder, Any]:
    config = _folder_config(folder)
    source = SafetensorsSource(folder, family_of(config.family))
    tokenizer = None
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    return assemble(config, source, dtype=dtype, mesh=mesh), tokenizer


def _gguf_config(file: GGUFFile) -> ModelConfig:
    try:
        return from_hf(read_fields(file))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _load_gguf(path: Path, dtype: str | None, mesh: jax.sharding.Mesh | None) -> tuple[Decoder, Any]:
    file = GGUFFile(path)
    config = _gguf_config(file)
    source = GGUFSource(file, config)
    tokenizer = build_tokenizer(file)
    return assemble(config, source, dtype=dtype or "float32", mesh=mesh), tokenizer
