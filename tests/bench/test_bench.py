import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import save_model

import jaxkv
from benchmarks import growth
from benchmarks.against_transformers import Torch, compare
from benchmarks.against_transformers import as_row as comparison_row
from jaxkv.bench.decode import HEADER
from jaxkv.bench.measure import Runner, Workload, memory_bandwidth, peak_memory, reset_peak_memory, step_bytes, table
from jaxkv.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder: Path) -> jaxkv.Decoder:
    return jaxkv.load(folder)[0]


@pytest.fixture(autouse=True)
def small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxkv.bench.decode.memory_bandwidth", lambda: memory_bandwidth(2**20, 1))
    monkeypatch.setattr("jaxkv.bench.decode.jax.config.update", lambda *_: None)


GRID = ["--batch-sizes", "1,2", "--context-lengths", "8", "--new-tokens", "8", "--repeats", "1"]


def test_decode_reports_every_cell_as_json(capsys, folder: Path) -> None:
    assert main(["bench", "decode", "--model", str(folder), *GRID, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(c["batch_size"], c["context_length"]) for c in report["cells"]] == [(1, 8), (2, 8)]
    assert report["dtype"] == "float32"
    for cell in report["cells"]:
        assert cell["prefill_tokens_per_second"] > 0
        assert cell["peak_memory_bytes"] > 2**20
        assert cell["bandwidth_share"] == pytest.approx(
            cell["step_bytes"] / report["bandwidth_bytes_per_second"] / cell["step_seconds"]
        )
        assert cell["decode_tokens_per_second"] == pytest.approx(cell["batch_size"] / cell["step_seconds"])


def test_decode_prints_a_table_for_people(capsys, folder: Path) -> None:
    assert main(["bench", "decode", "--model", str(folder), *GRID]) == 0
    lines = capsys.readouterr().out.splitlines()
    top = next(i for i, line in enumerate(lines) if re.split(r"  +", line.strip()) == HEADER)
    assert [line.split()[:2] for line in lines[top + 1 : top + 3]] == [["1", "8"], ["2", "8"]]


def test_a_context_too_long_is_refused_before_anything_runs(capsys, folder: Path) -> None:
    assert main(["bench", "decode", "--model", str(folder), "--context-lengths", "8,124", "--new-tokens", "8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "124" in captured.err
    assert "128" in captured.err


def test_one_program_for_the_short_and_the_long_run(model: jaxkv.Decoder) -> None:
    runner = Runner(model, Workload(2, 8, new_tokens=8))
    lengths = [runner.generate(n).lengths[:, 0].tolist() for n in (1, 2, 8)]
    assert lengths == [[1, 1], [2, 2], [8, 8]]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append("compile" in event and event))
    runner.run(5)
    assert not any(compiled)


def test_a_step_is_the_slope_between_two_runs(model: jaxkv.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", lambda self, new_tokens: 3.0 + 0.5 * new_tokens)
    timing = Runner(model, Workload(1, 8, new_tokens=8)).timing(repeats=3)
    assert timing.step_seconds == pytest.approx(0.5)
    assert timing.prefill_seconds == pytest.approx(3.5)


def test_bytes_of_a_step_by_hand(model: jaxkv.Decoder, tmp_path: Path) -> None:
    work = Workload(batch_size=3, context_length=10, new_tokens=8)  # short run 2: at mid-run 15 tokens a row
    parameters = 259 * 32 + 2 * (4 * 8 * 32 * 2 + 2 * 2 * 8 * 32 + 3 * 64 * 32 + 2 * 32) + 32
    keys_and_values = 3 * 15 * 2 * 2 * 2 * 8
    assert step_bytes(model, work) == 4 * (parameters + keys_and_values)
    windows = jaxkv.Decoder(dataclasses.replace(model.config, windows=(4, None)), rngs=nnx.Rngs(0))
    assert step_bytes(windows, work) == 4 * (parameters + 3 * (15 + 4) * 2 * 2 * 8)
    untied = jaxkv.Decoder(dataclasses.replace(model.config, tie_embeddings=False), rngs=nnx.Rngs(0))
    assert step_bytes(untied, work) == step_bytes(model, work)  # a few rows of the embedding are read, all of the head


@pytest.mark.parametrize("what", ["pool", "table", "waiting"])
def test_what_must_not_matter_is_compared_turn_by_turn(model: jaxkv.Decoder, what: str) -> None:
    pair = growth.variants(Workload(2, 8, new_tokens=64, page_size=16), what, factor=1 if what == "table" else 3)
    result = growth.compare(model, pair, repeats=2)
    assert [len(t) for t in result["turns"]] == [2 * (64 // growth.TURN - 1)] * 2
    assert result["ratio"] == pytest.approx(result["step_seconds"][1] / result["step_seconds"][0])


def test_variants_differ_in_one_thing() -> None:
    work = Workload(2, 8, new_tokens=64, page_size=16)
    small, large = growth.variants(work, "pool", 5)
    assert (small.work.num_pages, large.work.num_pages, small.room) == (11, 51, large.room)
    small, large = growth.variants(work, "table", 5)
    assert small.work == large.work and (small.room, large.room) == (64, 352)
    small, large = growth.variants(work, "waiting", 5)
    assert small.work == large.work and (small.waiting, large.waiting) == (64, 320)


@pytest.mark.parametrize(("named", "want"), [([], list(growth.WHAT)), (["table"], ["table"])])
def test_all_is_measured_unless_some_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: list[str], want: list[str]
) -> None:
    monkeypatch.setattr(growth, "compare", lambda *_: {"step_seconds": [0.001, 0.001], "ratio": 1.0})
    monkeypatch.setattr("sys.argv", ["flat", *named, "--model", str(folder), "--json"])
    growth.main()
    assert [name for name in json.loads(capsys.readouterr().out) if name in growth.WHAT] == want


def test_a_run_too_short_is_refused(model: jaxkv.Decoder) -> None:
    with pytest.raises(ValueError, match="at least 64, got 8"):
        growth.compare(model, growth.variants(Workload(2, 8, new_tokens=8), "pool", 5), repeats=2)


@pytest.mark.torch
def test_transformers_runs_beside_it_with_the_same_tokens(folder: Path, model: jaxkv.Decoder) -> None:
    cell = compare(model, Torch(str(folder), 1), Workload(2, 8, new_tokens=8), repeats=1)
    assert cell["same_tokens"] == 1.0
    assert cell["ratio"] == min(cell["ratios"].values())
    assert len(comparison_row(cell)) == 6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system cannot forget a process's peak")
def test_peak_memory_holds_what_has_been_freed_until_it_starts_anew() -> None:
    reset_peak_memory()
    before, size = peak_memory(), 2**28
    block = b"x" * size
    del block
    assert peak_memory() > before + size * 3 // 4
    reset_peak_memory()
    assert peak_memory() < before + size // 4


def test_a_table_is_flush_right() -> None:
    assert table(["a", "bb"], [["10", "2"], ["3", "400"]]) == " a   bb\n10    2\n 3  400"


def test_bandwidth_is_that_of_the_fastest_pass_over_the_whole_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is given: two ways to read the array, each three times."""
    clock, sums = iter([8.0, 4.0, 5.0, 9.0, 2.0, 3.0]), []

    def seconds(run: Callable[[], jax.Array]) -> float:
        sums.append(np.asarray(run()))
        return next(clock)

    monkeypatch.setattr("jaxkv.bench.measure.seconds", seconds)
    assert memory_bandwidth(2**20, repeats=3) == 2**20 / 2.0
    assert next(clock, None) is None
    array = np.asarray(jax.random.normal(jax.random.key(0), (64, 4096)))  # 2**20 bytes
    for each in sums:
        np.testing.assert_allclose(each, array.sum(axis=1), rtol=1e-3, atol=1e-3)
