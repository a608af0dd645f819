"""Native kernels in programs of their own: under sanitizers, which through jaxlib report what is not ours, and in an emulator of arm64."""

import shutil
import subprocess
from pathlib import Path

import pytest
from needs import SOURCES, needs_compiler

HERE = Path(__file__).parent
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def check(folder: Path, operation: str, cases: int, options: list[str], emulator: tuple[str, ...] = ()) -> None:
    """Builds an operation's driver and runs it over so many random calls."""
    configure = ["cmake", "-S", str(SOURCES.parent), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *options]
    configure += [f"-DJAXKV_DRIVER={HERE / f'{operation}_driver.cc'}", f"-DJAXKV_OPERATION={operation}"]
    build, run = ["cmake", "--build", str(folder), "--parallel", "2"], [*emulator, str(folder / "jaxkv_cpu"), str(cases)]
    for command in (configure, build, run):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("operation", "cases"), [("product", 500), ("attention", 60)])
def test_sanitizers_report_nothing(operation: str, cases: int, sanitizer: str, tmp_path: Path):
    check(tmp_path, operation, cases, [f"-DJAXKV_SANITIZE={sanitizer}"])


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which(ARM_COMPILER) or not shutil.which(ARM_EMULATOR), reason=f"needs {ARM_COMPILER} and {ARM_EMULATOR}"
)
@pytest.mark.parametrize(("operation", "cases"), [("product", 60), ("attention", 20)])
def test_neon_in_an_emulator(operation: str, cases: int, tmp_path: Path):
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}"]
    check(tmp_path, operation, cases, [*system, "-DCMAKE_EXE_LINKER_FLAGS=-static"], (ARM_EMULATOR,))
