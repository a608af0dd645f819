"""`python -m benchmarks.start_up` on a tiny model: that it measures what it says. How long anything takes is not tested."""

import types
from pathlib import Path

import pytest
import tiny

from benchmarks import start_up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.save_model(tmp_path / "model")
    return tmp_path / "model"


def test_load_is_held_against_reading_the_same_files(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The clock is given: the first load takes 30 s, the second 7 s and reading the file 2 s."""
    clock = iter([0.0, 30.0, 100.0, 107.0, 200.0, 202.0])
    monkeypatch.setattr(start_up, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    size = (folder / "model.safetensors").stat().st_size
    found = start_up.read_seconds(str(folder), None)
    assert found == {"load": 30.0, "load_again": 7.0, "read": 2.0, "file_bytes": size}


def test_the_second_process_starts_from_the_first_ones_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    cache = tmp_path / "cache"
    start_up._in_process("first_generate", str(folder), None, str(cache))
    kept = sorted(path.name for path in cache.iterdir() if path.name.endswith("-cache"))
    assert any("take_steps" in name for name in kept)
    start_up._in_process("first_generate", str(folder), None, str(cache))
    assert sorted(path.name for path in cache.iterdir() if path.name.endswith("-cache")) == kept, "compiled again"


def test_the_table_names_every_part():
    load = {"load": 1.0, "load_again": 0.7, "read": 0.5, "file_bytes": 2e6}
    figures = {"import_jax": 3.0, "import_jaxkv": 3.1, **load, "compile_cold": 8.0, "compile_warm": 2.0}
    figures["first_tokens"] = {"jaxkv, warm": {"import": 1.0, "load": 2.0, "token": 0.5, "all": 3.5}}
    rows = start_up.as_rows(figures)
    assert rows[0][1:] == ["0.10", "3.00 for jax, flax and transformers"]
    assert rows[1][1:] == ["1.00", "0.50 to read its 2 MB"]
    assert rows[2][1] == "0.70"
    assert rows[4][1:] == ["2.0", "25% of it, from the cache"]
    assert rows[5] == ["first token, jaxkv, warm", "3.50", "import 1.00, load 2.00, generate 0.50"]


def test_every_engine_is_timed_from_the_start_of_its_process(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Which processes are started, in which order; what they would measure is given."""
    calls: list[str] = []

    def timed(name: str, *rest: object) -> dict[str, float]:
        calls.append(name.removeprefix("first_token_of_"))
        return {"all": 10.0 - len(calls)}

    monkeypatch.setattr(start_up, "_timed", timed)
    monkeypatch.setattr(start_up, "find_spec", lambda name: name == "torch" or None)
    found = start_up.first_tokens(str(folder), None, 2)
    assert calls == ["jaxkv", "transformers", "jaxkv", "transformers", "jaxkv"]
    assert {name: run["all"] for name, run in found.items()} == {"jaxkv, cold": 9.0, "transformers": 6.0, "jaxkv, warm": 5.0}


def test_a_process_that_fails_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match="read_seconds failed"):
        start_up._in_process("read_seconds", str(tmp_path), None)
