"""Builds the native kernels into the source tree, for those who work on them: `python -m pallas_kernels.cpu.build`.

An installation builds them by itself. In a checkout that is on `sys.path` without being installed, or after a change of the sources, this
does it: in seconds, with the compiler's messages, and only what has changed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax.ffi

HERE = Path(__file__).parent


def build(folder: Path, *, debug: bool = False) -> Path:
    """Configures and builds in `folder`, and puts the library beside this file.

    Args:
      folder: of CMake, made where it is missing.
      debug: without optimisation, with assertions.

    Returns:
      The library's path.

    Raises:
      FileNotFoundError: there is no CMake.
      subprocess.CalledProcessError: it failed; its messages went to stderr.
    """
    from pallas_kernels.cpu.library import FILE

    configure = ["cmake", "-S", str(HERE), "-B", str(folder), f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}"]
    subprocess.run([*configure, f"-DJAXKV_FFI_INCLUDE={jax.ffi.include_dir()}"], check=True)
    subprocess.run(["cmake", "--build", str(folder), "--parallel", "2"], check=True)
    made, wanted = folder / FILE, HERE / FILE
    beside = wanted.with_suffix(".new")
    beside.write_bytes(made.read_bytes())
    beside.replace(wanted)  # at once: a process that has the old one mapped keeps it
    return wanted


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.cpu.build", description="Build the native CPU kernels.")
    default = HERE.parent.parent / "build" / f"cpu-{sysconfig.get_platform()}"
    parser.add_argument("--folder", type=Path, default=default, help="where CMake works (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="without optimisation, with assertions")
    given = parser.parse_args()
    print(build(given.folder, debug=given.debug), file=sys.stderr)


if __name__ == "__main__":
    main()
