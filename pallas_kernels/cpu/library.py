"""The shared library of native kernels: found, checked against the running jaxlib, registered with XLA, and called.

It is loaded once, when the first program that may use it is lowered. Registering starts no backend of jax.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.ffi
import numpy as np

import pallas_kernels.cpu

FILE = "libjaxkv_cpu.so"
HANDLERS = ("attention", "product", "product_of_live", "rotation", "write_pages")
"""What the library exports, each as `jaxkv_<name>`."""
TARGETS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")
"""Kinds of processors in rising order, numbered as in src/target.h. "baseline" is SSE2 on x86-64 and NEON on arm64."""
VARIABLE = "JAXKV_CPU_TARGET"
"""The environment variable that names another target than the one taken by default."""

_lock = threading.Lock()


class NativeKernelsWarning(UserWarning):
    """The native CPU kernels cannot be used, and why."""


@dataclasses.dataclass(frozen=True)
class Library:
    """The library in use.

    Args:
      path: of the file.
      build: hash of the sources that it was built from.
      targets: those of TARGETS that it was built for and this processor has, in rising order.
      target: the one of them that runs.
    """

    path: Path
    build: str
    targets: tuple[str, ...]
    target: str


def _of_the_sources(folder: Path) -> str | None:
    """The hash of the sources in the folder, as CMakeLists.txt computes it; None where there are none."""
    inputs = sorted([*folder.glob("src/*.cc"), *folder.glob("src/*.h")], key=lambda path: path.name)
    if not inputs:
        return None
    inputs.append(folder / "CMakeLists.txt")
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in inputs)
    return hashlib.sha256(hashes.encode()).hexdigest()[:12]


def _version_of_jaxlib() -> tuple[int, int]:
    """(major, minor) of XLA's interface in the running jaxlib, which ships its own headers."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.M) for part in ("MAJOR", "MINOR"))
    assert major is not None and minor is not None
    return int(major[1]), int(minor[1])


def version_refusal(built: tuple[int, int], running: tuple[int, int]) -> str | None:
    """Why handlers compiled against one version of XLA's interface cannot be registered with another, or None.

    A runtime knows all that older minor versions of its major version knew. It refuses newer ones when it starts, and the platform then
    does not start at all, for any program: so nothing may be registered that it would refuse.
    """
    if built[0] == running[0] and built[1] <= running[1]:
        return None
    return (
        f"they were built for version {built[0]}.{built[1]} of XLA's interface, jaxlib {importlib.metadata.version('jaxlib')} has "
        f"{running[0]}.{running[1]}; install the package again with this jaxlib"
    )


def _open(path: Path) -> tuple[ctypes.CDLL, str] | str:
    """(library, its build), or why the file cannot be used here."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    library.jaxkv_build.restype = library.jaxkv_targets.restype = library.jaxkv_target.restype = ctypes.c_char_p
    library.jaxkv_set_target.argtypes = [ctypes.c_char_p]
    reason = version_refusal((library.jaxkv_ffi_major(), library.jaxkv_ffi_minor()), _version_of_jaxlib())
    return reason or (library, library.jaxkv_build().decode())


def _installed_folder() -> Path | None:
    """Where the installation of jaxkv, if there is one, has put the library."""
    try:
        return Path(str(importlib.metadata.distribution("jaxkv").locate_file("pallas_kernels/cpu")))
    except importlib.metadata.PackageNotFoundError:
        return None


def _find() -> tuple[Path, ctypes.CDLL, str] | str:
    """(path, library, build) of the first file that can be used, or why there is none.

    An editable installation keeps sources and library in different folders. The package's path names both, unless an import hook
    (jaxtyping's, in the tests) has found the package before the installation's own; so the installation is asked, too.
    """
    folders = [Path(folder) for folder in pallas_kernels.cpu.__path__]
    installed = _installed_folder()
    if installed is not None and installed not in folders:
        folders.append(installed)
    sources = next((build for folder in folders if (build := _of_the_sources(folder))), None)
    reasons = []
    for path in (folder / FILE for folder in folders):
        if not path.exists():
            continue
        opened = _open(path)
        if isinstance(opened, str):
            reasons.append(opened)
        elif sources is not None and opened[1] != sources:
            reasons.append(f"{path} was built from other sources than there are now; run `python -m pallas_kernels.cpu.build`")
        else:
            return path, *opened
    return "; ".join(reasons) or (
        f"the package was installed without {FILE}, which needs a C++ compiler: `pip install -v` shows why it was not built, "
        "in a checkout `python -m pallas_kernels.cpu.build` does"
    )


def _registered_name(handler: str, build: str) -> str:
    return f"jaxkv_{handler}_{build}"


@functools.cache
def _loaded(wanted: str | None) -> Library | str:
    found = _find()
    if isinstance(found, str):
        warnings.warn(f"the native CPU kernels cannot run, XLA's take their place: {found}", NativeKernelsWarning, stacklevel=2)
        return found
    path, library, build = found
    targets = tuple(library.jaxkv_targets().decode().split())
    if wanted is not None and not library.jaxkv_set_target(wanted.encode()):
        raise ValueError(f"{VARIABLE} must be one of {targets} on this processor, got {wanted!r}")
    for handler in HANDLERS:
        function = getattr(library, f"jaxkv_{handler}")
        jax.ffi.register_ffi_target(_registered_name(handler, build), jax.ffi.pycapsule(function), platform="cpu")
    return Library(path, build, targets, library.jaxkv_target().decode())


def load() -> Library | str:
    """The library, loaded and registered; or why it cannot be used, which a NativeKernelsWarning says once, too.

    Raises:
      ValueError: JAXKV_CPU_TARGET names no target that this processor has.
    """
    with _lock:
        return _loaded(os.environ.get(VARIABLE) or None)


def available() -> bool:
    """Whether programs lowered here for a CPU can use the native kernels. Raises as `load`."""
    return isinstance(load(), Library)


def why_not() -> str | None:
    """Why `available` is false, or None. Raises as `load`."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


def call(
    handler: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *arrays: jax.Array,
    target: str | None = None,
    aliases: Mapping[int, int] | None = None,
    **attributes: np.generic | bool | str,
) -> list[jax.Array]:
    """Calls a handler of the library, which must be available.

    Args:
      handler: one of HANDLERS.
      results: shapes and dtypes of what it returns.
      arrays: its arguments.
      target: one of the library's targets; None is the one in use. For tests.
      aliases: number of an argument to number of the result that takes its memory.
      attributes: further values, typed as the handler declares them.

    Returns:
      The results, in order.
    """
    library = load()
    assert isinstance(library, Library), library
    assert handler in HANDLERS, handler
    number = np.int32(-1 if target is None else TARGETS.index(target))
    types: Any = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    function = jax.ffi.ffi_call(_registered_name(handler, library.build), types, input_output_aliases=dict(aliases or {}))
    return list(function(*arrays, target=number, **attributes))
