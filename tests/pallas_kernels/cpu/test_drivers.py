"""Native kernels under sanitizers, in programs of their own: through jaxlib these report what is none of ours."""

import subprocess
from pathlib import Path

import pytest
from needs import SOURCES, needs_compiler

HERE = Path(__file__).parent


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(("operation", "cases"), [("product", 500), ("attention", 60)])
def test_random_shapes(operation: str, cases: int, sanitizer: str, tmp_path: Path):
    configure = [
        "cmake",
        "-S",
        str(SOURCES.parent),
        "-B",
        str(tmp_path),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DJAXKV_SANITIZE={sanitizer}",
    ]
    configure += [f"-DJAXKV_DRIVER={HERE / f'{operation}_driver.cc'}", f"-DJAXKV_OPERATION={operation}"]
    for command in (
        configure,
        ["cmake", "--build", str(tmp_path), "--parallel", "2"],
        [str(tmp_path / "jaxkv_cpu"), str(cases)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
