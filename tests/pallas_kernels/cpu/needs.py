"""What tests of the native kernels need: the library, a compiler."""

import shutil
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu import library

SOURCES = Path(library.__file__).parent / "src"
HERE = jax.default_backend() == "cpu" and library.available()

needs_library = pytest.mark.skipif(not HERE, reason="needs the native CPU kernels")
needs_compiler = pytest.mark.skipif(
    not shutil.which("c++") or not shutil.which("cmake") or not SOURCES.exists(),
    reason="needs a C++ compiler, CMake and the sources",
)


def targets() -> list[str]:
    """All that the processor has."""
    loaded = library.load()
    return list(loaded.targets) if isinstance(loaded, library.Library) else ["none"]
