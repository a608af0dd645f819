"""What the machine allows: bytes and multiply-adds counted by hand, and the tables that show them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from flax import nnx
from tiny import save_model

import jaxkv
from benchmarks.compare_report import best_peer, notes, tables
from benchmarks.limits import Costs, Speed, Work, _seen, matmul_peak, measure_speed
from jaxkv.bench.measure import Workload, step_bytes

LINEAR = 2 * (4 * 8 * 32 * 2 + 2 * 2 * 8 * 32 + 3 * 64 * 32)  # q and o, k and v, gate up down of two layers
HEAD = 259 * 32
KEY = 2 * 4 * 8  # multiply-adds of q.k and p.v with one key, all heads of a layer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> jaxkv.Decoder:
    return jaxkv.load(save_model(tmp_path_factory.mktemp("tiny")))[0]


@pytest.mark.parametrize("windows", [(), (3, None), (100, 1)])
@pytest.mark.parametrize("first, last", [(0, 7), (2, 3), (5, 9), (4, 4)])
def test_keys_seen_are_those_counted_one_by_one(model: jaxkv.Decoder, windows, first: int, last: int) -> None:
    config = dataclasses.replace(model.config, windows=windows)
    one_by_one = sum(min(i + 1, config.window(layer) or i + 1) for layer in range(2) for i in range(first, last))
    assert _seen(config, first, last) == one_by_one


def test_costs_by_hand(model: jaxkv.Decoder) -> None:
    costs = Costs(model)
    assert (costs.linear, costs.head) == (LINEAR, HEAD)
    assert costs.prefill(3) == Work(0, 3 * LINEAR + HEAD + 2 * KEY * (1 + 2 + 3))
    per_key = 2 * 2 * 8 * 4  # key and value, two kv heads, float32
    assert costs.decode(3, 2) == Work(2 * per_key * (4 + 5), 2 * (LINEAR + HEAD) + 2 * KEY * (4 + 5))
    assert costs.batch_prefill(5, 3) == Work(costs.parameter_bytes, 5 * costs.prefill(3).multiply_adds)


def test_a_step_reads_what_the_decode_benchmark_says(model: jaxkv.Decoder) -> None:
    work = Workload(batch_size=3, context_length=10, new_tokens=8)  # holds 15 tokens a row in the middle of its two runs
    assert Costs(model).step(3, 10, 8).nbytes == step_bytes(model, work)


def test_an_untied_head_counts_and_its_embedding_does_not(model: jaxkv.Decoder) -> None:
    untied = Costs(jaxkv.Decoder(dataclasses.replace(model.config, tie_embeddings=False), rngs=nnx.Rngs(0)))
    assert (untied.linear, untied.head, untied.parameter_bytes) == (LINEAR, HEAD, Costs(model).parameter_bytes)


def test_ragged_requests_take_as_many_passes_as_rows_allow(model: jaxkv.Decoder) -> None:
    costs = Costs(model)
    answers = [2, 3, 7]
    for rows, passes in ((1, 12), (2, 7), (3, 7)):  # the longest answer is a bound of its own
        keys = sum(costs.decode(4, n - 1).nbytes for n in answers)
        assert costs.ragged([4, 4, 4], answers, rows).nbytes == passes * costs.parameter_bytes + keys


def test_the_limit_is_the_longer_of_memory_and_arithmetic() -> None:
    speed = Speed(bandwidth=10.0, multiply_adds=100.0)
    memory = speed.limit(Work(50, 100))
    assert (memory["seconds"], memory["bound"], memory["arithmetic_seconds"]) == (5.0, "memory", 1.0)
    assert speed.limit(Work(5, 100))["bound"] == "arithmetic"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_that_of_the_fastest_run_after_the_first(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is given: the first run of a size compiles and does not count, however short it was."""
    clock, products = iter([1e-9, 4.0, 2.0, 5.0, 1e-9, 64.0, 16.0, 32.0]), []

    def seconds(run: Callable[[], jax.Array]) -> float:
        products.append(run())
        return next(clock)

    monkeypatch.setattr("benchmarks.limits.seconds", seconds)
    assert matmul_peak(dtype, (8, 16), repeats=3) == max(8**3 / 2.0, 16**3 / 16.0) == 256.0
    assert [(out.shape, out.dtype.name) for out in products] == [((8, 8), dtype)] * 4 + [((16, 16), dtype)] * 4
    assert next(clock, None) is None


def test_the_speed_is_the_best_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.limits.memory_bandwidth", lambda: 3.0)
    monkeypatch.setattr("benchmarks.limits.matmul_peak", lambda dtype: 5.0)
    assert measure_speed("float32") == Speed(3.0, 5.0)
    assert measure_speed("float32", Speed(4.0, 2.0)) == Speed(4.0, 5.0)


def report_part() -> dict:
    limit = Speed(10.0, 100.0).limit(Work(20, 100))  # 2 s of memory, 1 s of arithmetic

    def engine(times: float) -> dict:
        figures = {f"{kind}_{name}": 4.0 * times for kind in ("decode", "prefill") for name in ("share", "tokens_per_second")}
        ratios = {"step_seconds": times, "prefill_seconds": times}
        return {**figures, "decode_share": 0.5, "prefill_share": 0.25, "times_ours": ratios, "same_tokens": 1 / times}

    cell = {
        "kind": "grid",
        "batch_size": 6,
        "prompt_length": 8,
        "decode_limit": limit,
        "prefill_limit": limit,
        "engines": {"jaxkv": engine(1.0), "near": engine(1.25), "far": engine(2.0)},
        "failed": {"broken": "no reason"},
    }
    engines = {name: {"version": "1"} for name in ("jaxkv", "near", "far", "broken")}
    return {"dtype": "float32", "engines": engines, "skipped": {"absent": "x"}, "failed": {}, "cells": [cell]}


def test_a_table_shows_the_ratio_to_the_best_peer_and_the_share_of_both_limits() -> None:
    (decode, text), (prefill, _) = tables(report_part())
    assert (decode, prefill) == ("decode, float32, tokens/s", "prefill, float32, tokens/s")
    row = text.splitlines()[1].split()
    assert row[:2] == ["6", "8"]
    assert row[-5:] == ["1.25", "near", "3", "50%", "25%"]  # 6 tokens in 2 s; half of the memory's, a quarter of the arithmetic
    assert row[5] == "-"


def test_notes_name_equal_tokens_and_whatever_did_not_run() -> None:
    assert notes(report_part()) == [
        "near: 80.0% to 80.0% of its tokens are jaxkv's",
        "far: 50.0% to 50.0% of its tokens are jaxkv's",
        "absent: not installed (x)",
        "broken: failed at batch 6, prompt 8 (no reason)",
    ]


def test_without_peers_there_is_no_best(tmp_path: Path) -> None:
    (cell,) = report_part()["cells"]
    assert best_peer({**cell, "engines": {"jaxkv": cell["engines"]["jaxkv"]}}, "decode") is None
