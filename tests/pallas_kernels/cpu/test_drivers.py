"""Native kernels in programs of their own: under sanitizers, which through jaxlib report what is none of ours, and for arm64."""

import shutil
import subprocess
from pathlib import Path

import pytest
from needs import SOURCES, needs_compiler

HERE = Path(__file__).parent
DRIVERS = [("product", 500), ("attention", 60)]
"""Operation, and random cases that take some seconds."""
ARM = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def build(operation: str, folder: Path, *options: str) -> str:
    """Builds an operation's driver; returns the program."""
    driver = (f"-DJAXKV_DRIVER={HERE / f'{operation}_driver.cc'}", f"-DJAXKV_OPERATION={operation}")
    run(["cmake", "-S", str(SOURCES.parent), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *driver, *options])
    run(["cmake", "--build", str(folder), "--parallel", "2"])
    return str(folder / "jaxkv_cpu")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("operation", "cases"), DRIVERS)
def test_random_shapes(operation: str, cases: int, sanitizer: str, tmp_path: Path):
    run([build(operation, tmp_path, f"-DJAXKV_SANITIZE={sanitizer}"), str(cases)])


@needs_compiler
@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="needs a compiler for arm64 and qemu-user",
)
@pytest.mark.parametrize(("operation", "cases"), DRIVERS)
def test_random_shapes_on_an_arm_that_is_emulated(operation: str, cases: int, tmp_path: Path):
    run(["qemu-aarch64", build(operation, tmp_path, *ARM, "-DCMAKE_EXE_LINKER_FLAGS=-static"), str(cases)])
