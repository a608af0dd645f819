"""How engines are timed in turns, by engines whose times are given; and the requests they get."""

import types

import pytest
from tiny import save_model

import jaxkv
from benchmarks import worker
from benchmarks.engines import OURS, EngineError
from benchmarks.workloads import equal, measure_equal, measure_ragged, ragged, same_tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> jaxkv.ModelConfig:
    return jaxkv.load(save_model(tmp_path_factory.mktemp("tiny")))[0].config


class Timed:
    """An engine whose runs take given times: in turn i, `turns[i]` times (20 ms and 10 ms a new token).

    Its first two runs, which warm it up, take a thousand times as long.
    """

    def __init__(self, *turns: float, room: int = 11):
        self.room = room
        self.left = [1000.0, 1000.0, *(factor for factor in turns for _ in range(2))]

    def ask(self, todo: str, *, prompts: list, new_tokens: list[int], rows: int, room: int) -> dict:
        assert (todo, room) == ("run", self.room)
        if not self.left:
            raise EngineError("asked once too often")
        seconds = self.left.pop(0) * (0.02 + 0.01 * max(new_tokens))
        return {"seconds": seconds, "tokens": [[prompt[-1]] * count for prompt, count in zip(prompts, new_tokens)]}


class Failing:
    """An engine that cannot run."""

    def ask(self, todo: str, **fields: object) -> dict:
        raise EngineError("no such thing")


def test_a_slope_and_a_ratio_by_hand(config: jaxkv.ModelConfig) -> None:
    """The median of the turns' ratios (2, 4 and 1) is 2; the ratio of the medians would be 1."""
    engines: dict = {OURS: Timed(1, 3, 2), "other": Timed(2, 12, 2), "bad": Failing()}
    found = measure_equal(engines, equal(config, 2, 5, 11), repeats=3)
    assert found["failed"] == {"bad": "no such thing"}
    assert set(found["engines"]) == {OURS, "other"}
    ours, other = found["engines"][OURS], found["engines"]["other"]
    for engine in (ours, other):
        assert engine["step_seconds"] == pytest.approx(2 * 0.01)
        assert engine["prefill_seconds"] == pytest.approx(2 * 0.03)
        assert engine["total_seconds"] == pytest.approx(2 * 0.13)
        assert engine["first_run_seconds"] == pytest.approx(1000 * 0.13)
        assert engine["decode_tokens_per_second"] == pytest.approx(2 / 0.02)
        assert engine["prefill_tokens_per_second"] == pytest.approx(2 * 5 / 0.06)
        assert engine["same_tokens"] == 1.0
    assert [turn["step_seconds"] for turn in other["turns"]] == pytest.approx([0.02, 0.12, 0.02])
    names = ("prefill_seconds", "step_seconds", "total_seconds")
    assert ours["times_ours"] == pytest.approx(dict.fromkeys(names, 1.0))
    assert other["times_ours"] == pytest.approx(dict.fromkeys(names, 2.0))


@pytest.mark.parametrize(("static", "calls"), [(False, 1), (True, 2)])
def test_a_worker_times_all_of_its_engines_work_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, static: bool, calls: int
) -> None:
    """Each call of the engine moves the clock by 5 s, and looking at the tokens afterwards by 100 s."""
    clock = [0.0]

    class Slow(int):
        def __int__(self) -> int:
            clock[0] += 100.0
            return 7

    def work(prompts: list, new_tokens: list[int], rows: int, room: int) -> list:
        clock[0] += 5.0
        return [[Slow()] * count for count in new_tokens]

    monkeypatch.setattr(worker, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = types.SimpleNamespace(static=static, run=work)
    assert worker.run(engine, [[1], [2], [3]], [2, 1, 1], 2, 2) == {"seconds": 5.0 * calls, "tokens": [[7, 7], [7], [7]]}


def test_ragged_requests_are_those_of_the_seed(config: jaxkv.ModelConfig) -> None:
    requests = ragged(config, 64, 16)
    assert sum(map(len, requests.prompts)) == 17_210
    assert sum(requests.answers) == 8_885
    assert not {*config.eos_token_ids} & {token for prompt in requests.prompts for token in prompt}


def test_ragged_requests_are_timed_from_the_first_prompt_to_the_last_answer(config: jaxkv.ModelConfig) -> None:
    """The run that warms up and the first turn take a thousand times as long; the median of three turns is 3 times."""
    requests = ragged(config, 8, 4)
    seconds = 0.02 + 0.01 * max(requests.answers)
    engines: dict = {OURS: Timed(3, room=max(requests.answers)), "bad": Failing()}
    found = measure_ragged(engines, requests, repeats=3)
    assert found["failed"] == {"bad": "no such thing"}
    ours = found["engines"][OURS]
    assert ours["first_run_seconds"] == pytest.approx(1000 * seconds)
    assert ours["total_seconds"] == pytest.approx(3 * seconds)
    assert ours["tokens_per_second"] == pytest.approx(sum(requests.answers) / (3 * seconds))
    assert ours["times_ours"] == {"total_seconds": 1.0}


def test_the_share_of_equal_tokens_counts_every_token_alike() -> None:
    assert same_tokens([[1, 2, 3], [4]], [[1, 2, 9], [4]]) == 0.75
