"""A decoder as a Hugging Face folder: safetensors, configuration, and the tokenizer if one is given."""

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxkv.families import Tensor, family_of, to_hf
from jaxkv.families.reading import write_token_ids
from jaxkv.model.decoder import Decoder, check_decoder, parameter_name
from jaxkv.weights.generation_defaults import FILE, GenerationDefaults
from jaxkv.weights.safetensors_file import INDEX, SINGLE, write_safetensors

SHARD_BYTES = 5 * 10**9
"""Size above which weights are split over several files."""


def save(
    model: Decoder, folder: str | os.PathLike, *, tokenizer: Any = None, generation: GenerationDefaults | None = None
) -> None:
    """Write a model so that `jaxkv.load` and transformers' `from_pretrained` read it again.

    Everything is written to a new folder beside `folder` and moved in its place at the end: a failure leaves what was there.

    Args:
      model: of any family, wherever it was loaded from.
      folder: where to; created with its parents. Files of the same names, and the weights of a model saved there before, are
        replaced, others stay.
      tokenizer: a transformers tokenizer to save along; without one none is written, and `jaxkv generate` cannot use the folder.
      generation: sampling defaults for `generation_config.json`, beside the model's token ids; `CausalLM.save_pretrained` gives
        those that it was loaded with.

    Raises:
      ValueError: the model's family cannot express its configuration.
      OSError: the folder cannot be written.
    """
    check_decoder(model)
    target = Path(folder)
    config = to_hf(model.config)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file, not a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_json(work / "config.json", config)
        _write_json(work / FILE, _generation(model, generation or GenerationDefaults()))
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        _write_weights(model, work)
        work.chmod(0o777 & ~_umask())
        _move(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _generation(model: Decoder, defaults: GenerationDefaults) -> dict:
    ids = {name: ids for name, ids in write_token_ids(model.config).items() if ids is not None}
    said = defaults.fields()
    return {**({} if said else {"_from_model_config": True}), **ids, **said}


def _write_weights(model: Decoder, folder: Path) -> None:
    config = model.config
    parameters = {parameter_name(path): v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tensors = {t.name: t for t in family_of(config.family).tensors(config)}

    def read(name: str) -> np.ndarray:
        return _tensor(tensors[name], parameters)

    def entries(shard: list[Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
        return [(t.name, t.shape, _dtype(t, parameters)) for t in shard]

    shards = _shards(list(tensors.values()), {t.name: np.dtype(_dtype(t, parameters)).itemsize for t in tensors.values()})
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, entries(shards[0]), read)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, entries(shard), read)
        weight_map |= {t.name: file for t in shard}
    size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _dtype(tensor: Tensor, parameters: dict[str, Any]) -> str:
    """The name of its parameter's dtype: in a model of mixed precision each has its own."""
    return parameters[tensor.parts[0].parameter].get_value().dtype.name


def _tensor(tensor: Tensor, parameters: dict[str, Any]) -> np.ndarray:
    """One tensor in the file's form, its blocks copied out of their parameter."""
    host = np.asarray(parameters[tensor.parts[0].parameter].get_value())
    views = [part.view(host) for part in tensor.parts]
    blocks = [view.reshape(tensor.rows(view), *tensor.shape[1:]) for view in views]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _shards(tensors: list[Tensor], itemsizes: dict[str, int]) -> list[list[Tensor]]:
    """Tensors in order, cut where a file would grow above `SHARD_BYTES`."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * itemsizes[tensor.name]
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards


def _move(work: Path, target: Path) -> None:
    """Put the finished folder in its place; into an existing one file by file, weights of an earlier model removed."""
    if not target.exists():
        work.rename(target)
        return
    new = {path.name for path in work.iterdir()}
    for path in work.iterdir():
        os.replace(path, target / path.name)
    for path in target.glob("model*.safetensors*"):
        if path.name not in new and (path.name == SINGLE or path.name == INDEX or path.name.startswith("model-")):
            path.unlink()
