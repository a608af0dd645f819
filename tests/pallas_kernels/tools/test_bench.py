"""The bench's own arithmetic, its timing code on the CPU, and its report where it can compile."""

import json

import pytest

from pallas_kernels.tools import bench, gpu_check
from pallas_kernels.tools.compile_report import missing_tools
from pallas_kernels.tools.targets import TARGETS


def test_page_bytes_counts_whole_pages():
    case = bench.BenchCase(2, 17, kv_heads=3, head_dim=64, page_size=16, dtype="float32")
    assert case.page_bytes() == 2 * (2 * 2) * 16 * 3 * 64 * 4


def test_occupancy_is_bounded_by_each_resource():
    target = TARGETS["sm_90a"]
    assert bench.occupancy(target, 32, 128, 0) == 1.0
    assert bench.occupancy(target, 128, 128, 0) == 4 * 128 / 2048
    assert bench.occupancy(target, 32, 128, 100_000) == 2 * 128 / 2048


def test_measures_on_the_cpu_too():
    case = bench.BenchCase(2, 40, heads=4, kv_heads=2, head_dim=16, dtype="float32")
    result = bench.measure((case,), ("xla",))
    (row,) = result["rows"]
    assert row["name"] == "xla" and row["seconds"] > 0
    assert row["bytes_per_second"] == pytest.approx(case.page_bytes() / row["seconds"])


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
def test_without_a_gpu_the_last_line_is_the_compile_report(capsys):
    assert bench.main(["--quick"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["kind"] == "compiled, never run" and {row["target"] for row in last["rows"]} == set(TARGETS)


@pytest.mark.skipif(missing_tools() is None, reason="here the bench can compile")
def test_without_a_gpu_or_compiler_it_says_so(capsys):
    assert bench.main([]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kind"] == "nothing"


def test_the_gpu_script_fits_ten_minutes():
    assert sum(limit for _, _, limit in gpu_check.steps("compute-sanitizer")) < 600


def test_the_sanitized_program_is_right_on_the_cpu():
    exec(gpu_check.SANITIZED.replace("'triton'", "'triton_interpret'"), {})
