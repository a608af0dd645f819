"""`jaxkv.load`: from a name or path to a decoder and its tokenizer."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxkv.config import ModelConfig
from jaxkv.families import family_of, from_hf
from jaxkv.families.checking import TOKENS, token
from jaxkv.model.decoder import Decoder
from jaxkv.weights.assemble import assemble
from jaxkv.weights.default_model import ALIASES, default_model_path
from jaxkv.weights.folder_tokenizer import folder_tokenizer
from jaxkv.weights.generation_defaults import GenerationDefaults, read_generation_defaults
from jaxkv.weights.gguf_file import GGUFFile, open_gguf
from jaxkv.weights.gguf_model import GGUFSource, read_fields
from jaxkv.weights.gguf_tokenizer import gguf_tokenizer
from jaxkv.weights.hub import download_folder
from jaxkv.weights.safetensors_file import SafetensorsSource, read_json, what_else
from jaxkv.weights.source import Source

_DTYPES = ("float32", "bfloat16", "float16")
_HUB_ID = r"[\w.-]+(/[\w.-]+)?"
_SPELLINGS = {"float": "float32", "fp32": "float32", "f32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"}
_SPELLINGS |= {"f16": "float16"}


def load(name_or_path: str | os.PathLike, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None) -> tuple[Decoder, Any]:
    """Load a model and its tokenizer, without torch.

    Args:
      name_or_path: a model id of the hub; a Hugging Face folder with safetensors; a `.gguf` file; or "default" (also
        "smollm2-135m-instruct"), a small instruct model that is fetched once and kept in the user's cache folder.
      dtype: of the parameters, "float32", "bfloat16" or "float16", in any spelling ("bf16", "torch.bfloat16", a dtype of JAX's or
        torch's); None and "auto" keep the file's, and float32 for GGUF.
      mesh: devices to spread the parameters over, with an axis "tensor"; None is the default device.

    Returns:
      The decoder, and a transformers tokenizer, or None where the files hold none, or one that cannot be used: a
      `jaxkv.weights.TokenizerWarning` says why.

    Raises:
      FileNotFoundError: no such file or folder, or a file in it is missing.
      ValueError: a broken file, an unknown family, a configuration that is not supported, tensors that do not fit; the
        message names the file and the value. Nothing has been built then.
      ConnectionError: the hub or the package index cannot be reached.
    """
    chosen = dtype_name(dtype)
    opened = open_model(name_or_path)
    return opened.decoder(dtype=chosen, mesh=mesh), opened.tokenizer


class Opened(NamedTuple):
    """A model's files, checked and with the tokenizer read, but no weight yet.

    Attributes:
      config: its mathematics.
      tokenizer: a transformers tokenizer, or None.
      source: its tensors.
      dtype: of the parameters where nothing else is asked for; None is the files'.
      folder: of the files, None for a GGUF file.
    """

    config: ModelConfig
    tokenizer: Any
    source: Source
    dtype: str | None
    folder: Path | None = None

    def generation_defaults(self) -> GenerationDefaults:
        """What the model's `generation_config.json` says.

        Raises:
          ValueError: the file is broken, or a field in it.
        """
        return read_generation_defaults(self.folder)

    def decoder(self, *, dtype: str | None = None, mesh: jax.sharding.Mesh | None = None) -> Decoder:
        """Read the weights."""
        return assemble(self.config, self.source, dtype=dtype or self.dtype, mesh=mesh)


def open_model(name_or_path: str | os.PathLike) -> Opened:
    """Everything of a model but its weights.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as `load`.
    """
    path = find(name_or_path)
    if path.is_dir():
        config = _folder_config(path)
        source = SafetensorsSource(path, family_of(config.family))
        return Opened(config, folder_tokenizer(path), source, None, path)
    file = open_gguf(path)
    config = _gguf_config(file)
    source = GGUFSource(file, config)
    return Opened(config, gguf_tokenizer(file), source, "float32")


def dtype_name(dtype: Any) -> str | None:
    """A dtype in our spelling, None for "auto" and None: "torch.bfloat16", "bf16", `jnp.bfloat16` and `torch.bfloat16` are alike.

    Raises:
      ValueError: no model runs in it.
    """
    name = str(dtype) if type(dtype).__module__ == "torch" else dtype
    if not isinstance(name, str | None):
        try:
            name = jax.numpy.dtype(name).name
        except TypeError:
            name = repr(dtype)
    if name is None or name == "auto":
        return None
    plain = name.removeprefix("torch.")
    plain = _SPELLINGS.get(plain, plain)
    if plain not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES} or None, got {dtype!r}")
    return plain


def find(name_or_path: Any) -> Path:
    """The folder or GGUF file of a model, fetched if it must be.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as `load`.
    """
    if not isinstance(name_or_path, str | os.PathLike) or not os.fspath(name_or_path):
        raise ValueError(f"name_or_path must be a hub id, a folder or a .gguf file, got {name_or_path!r}")
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
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
    return _folder_config(path) if path.is_dir() else _gguf_config(open_gguf(path))


def _folder_config(folder: Path) -> ModelConfig:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} is missing{what_else(folder)}")
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():  # its token ids are those that generation uses
        ids = {k: v for k, v in read_json(generation).items() if k in TOKENS and v is not None}
        try:
            for name, value in ids.items():
                token(name, value)
        except ValueError as error:
            raise ValueError(f"{generation}: {error}") from error
        fields |= ids
    try:
        return from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def _gguf_config(file: GGUFFile) -> ModelConfig:
    try:
        return from_hf(read_fields(file))
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
