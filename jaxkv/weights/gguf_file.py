"""The GGUF container: metadata, and tensors that are dequantized one at a time.

Every count and offset is checked against the file's length before it is used, so that a cut or damaged file is reported and
never read past its end. The tables of formats and the dequantization are the `gguf` package's.

    "GGUF"  u32 version  u64 tensors  u64 entries | entries: key, type, value | tensors: name, dims, type, offset | data

Source: the format's specification in ggml's documentation (`docs/gguf.md`).
"""

import dataclasses
import functools
import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its shape with the fastest axis last, its storage type, and where its bytes are."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    """Reads a mapped file front to back and refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def _take(self, nbytes: int, what: str) -> int:
        start = self.at
        if nbytes > self.size - start:
            raise ValueError(
                f"{self.path} is truncated or corrupt: {what} at byte {start} needs {nbytes} bytes, the file has {self.size}"
            )
        self.at += nbytes
        return start

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self._take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        start = self._take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is corrupt: {what} at byte {start} is not UTF-8") from error

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise ValueError(f"{self.path} is corrupt: {what} has the unknown type {kind}")
        item, count = self.scalar("I", what), self.scalar("Q", what)
        if item in _SCALARS:
            start = self._take(count * struct.calcsize("<" + _SCALARS[item]), what)
            return np.frombuffer(self.data, "<" + _SCALARS[item], count, start).tolist()
        if count > self.size - self.at:  # each item takes at least one byte
            raise ValueError(f"{self.path} is truncated or corrupt: {what} claims {count} items")
        return [self.value(item, what) for _ in range(count)]


class GGUFFile:
    """A GGUF file that has been read up to its tensors' data.

    Args:
      path: the file.

    Attributes:
      metadata: key -> number, bool, string or list.
      tensors: name -> `GGUFTensor`.

    Raises:
      ValueError: it is no GGUF file, is truncated or corrupt, or has tensors of a type that cannot be dequantized.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        if os.path.getsize(path) < 24:
            raise ValueError(f"{path} is no GGUF file: it has only {os.path.getsize(path)} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            self._read_header(_Cursor(path, data))
        unsupported = sorted({t.kind.name for t in self.tensors.values() if not _can_dequantize(t.kind)})
        if unsupported:
            raise ValueError(f"{path} has tensors in unsupported quantization: {', '.join(unsupported)}")

    def _read_header(self, cursor: _Cursor) -> None:
        magic = cursor.data[:4]
        if magic != _MAGIC:
            raise ValueError(f"{self.path} is no GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
        cursor.at = 4
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF of version {version}; supported are 2 and 3, little-endian")
        num_tensors, num_entries = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the entry count")
        for number in range(num_entries):
            key = cursor.string(f"the key of entry {number} of {num_entries}")
            self.metadata[key] = cursor.value(cursor.scalar("I", f"the type of {key}"), key)
        infos = [self._read_info(cursor, number, num_tensors) for number in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path} is corrupt: general.alignment is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        for info in infos:
            tensor = dataclasses.replace(info, offset=start + info.offset)
            if tensor.offset + tensor.nbytes > cursor.size:
                raise ValueError(
                    f"{self.path} is truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.nbytes}, "
                    f"the file has {cursor.size}"
                )
            self.tensors[tensor.name] = tensor

    def _read_info(self, cursor: _Cursor, number: int, total: int) -> GGUFTensor:
        name = cursor.string(f"the name of tensor {number} of {total}")
        num_dims = cursor.scalar("I", name)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"{self.path} is corrupt: tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([cursor.scalar("Q", name) for _ in range(num_dims)]))
        code = cursor.scalar("I", name)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name} has the unknown quantization type {code}") from error
        items, nbytes = GGML_QUANT_SIZES[kind]
        if name in self.tensors or (shape and shape[-1] % items):
            raise ValueError(f"{self.path} is corrupt: tensor {name} of shape {list(shape)} is no {kind.name}")
        return GGUFTensor(self.path, name, shape, kind, cursor.scalar("Q", name), math.prod(shape) // items * nbytes)

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        tensor = self.tensors[name]
        packed = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset)
        rows = packed.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, tensor.kind).reshape(tensor.shape)


def open_gguf(path: Path) -> GGUFFile:
    """A GGUF file, or all parts of one that was split, whichever part is given: model-00001-of-00003.gguf.

    Raises:
      FileNotFoundError: a part is missing.
      ValueError: as for `GGUFFile`, or the parts do not belong together.
    """
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return file
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[3]) != count:
        raise ValueError(f"{path} is one of {count} parts: name them NAME-00001-of-{count:05}.gguf and so on")
    paths = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise FileNotFoundError(f"{path} is one of {count} parts, and {len(missing)} are missing: {', '.join(missing)}")
    parts = [file if p == path else GGUFFile(p) for p in paths]
    first, tensors = parts[0], {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise ValueError(f"{part.path} says that it is part {part.metadata.get('split.no')}, expected {number} (split.no)")
        if twice := tensors.keys() & part.tensors.keys():
            raise ValueError(f"{part.path} holds the tensor {min(twice)}, which {tensors[min(twice)].path} holds as well")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(f"{path}: its {count} parts hold {len(tensors)} tensors, expected {expected} (split.tensors.count)")
    first.tensors = tensors
    return first


@functools.cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can, found out on one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
