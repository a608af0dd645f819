"""What `python -m benchmarks.compare` runs: a grid of equal prompts, and ragged requests; and how it times engines in turns."""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.engines import OURS, Engine, EngineError
from jaxkv.config import ModelConfig

PROMPT_RANGE, ANSWER_RANGE = (16, 512), (16, 256)
"""Shortest and longest prompt and answer of the ragged requests, in tokens."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """Prompts, and how many tokens each is answered with.

    Attributes:
      prompts: token ids.
      answers: new tokens of each.
      rows: most prompts in progress at the same time.
    """

    prompts: list[list[int]]
    answers: list[int]
    rows: int

    def fields(self, new_tokens: int | None = None) -> dict[str, Any]:
        """The fields of a worker's message; `new_tokens` replaces every prompt's own number."""
        answers = self.answers if new_tokens is None else [new_tokens] * len(self.answers)
        return {"prompts": self.prompts, "new_tokens": answers, "rows": self.rows, "room": max(self.answers)}


def random_ids(rng: np.random.Generator, config: ModelConfig, length: int) -> list[int]:
    """Random token ids without those that begin, end or pad a text, which some engines treat specially."""
    special = {*config.eos_token_ids, config.bos_token_id, config.pad_token_id}
    allowed = np.setdiff1d(np.arange(config.vocab_size), [x for x in special if x is not None])
    return rng.choice(allowed, length).tolist()


def equal(config: ModelConfig, batch: int, length: int, new_tokens: int) -> Requests:
    """`batch` prompts of `length` tokens, `new_tokens` for each."""
    rng = np.random.default_rng(0)
    return Requests([random_ids(rng, config, length) for _ in range(batch)], [new_tokens] * batch, batch)


def ragged(config: ModelConfig, count: int, rows: int) -> Requests:
    """`count` prompts and answers of random lengths, uniform in PROMPT_RANGE and ANSWER_RANGE."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(PROMPT_RANGE[0], PROMPT_RANGE[1] + 1, count)
    answers = rng.integers(ANSWER_RANGE[0], ANSWER_RANGE[1] + 1, count).tolist()
    return Requests([random_ids(rng, config, int(n)) for n in lengths], answers, rows)


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of positions with the same token, in [0, 1]."""
    return float(np.mean(np.concatenate([np.equal(x, y) for x, y in zip(ours, theirs)])))


class Turns:
    """Runs engines in turns and collects their times. An engine that fails is left out from then on.

    Args:
      engines: by name, ours among them.
      say: called with a line of text for every failure.
    """

    def __init__(self, engines: dict[str, Engine], say: Callable[[str], object] = lambda text: print(text, file=sys.stderr)):
        self.engines, self.say = engines, say
        self.failed: dict[str, str] = {}

    def each(self, names: Iterable[str], do: Callable[[Engine], Any]) -> dict[str, Any]:
        """Name to what `do` returned for it."""
        done = {}
        for name in names:
            if name in self.failed:
                continue
            try:
                done[name] = do(self.engines[name])
            except EngineError as error:
                self.failed[name] = str(error)
                self.say(f"  {name} failed: {error}")
        return done

    def repeat(self, repeats: int, do: Callable[[Engine], Any]) -> dict[str, list[Any]]:
        """Name to results, for engines that never failed. Every repetition begins with another engine."""
        names, results = list(self.engines), {name: [] for name in self.engines}
        for turn in range(repeats):
            first = turn % len(names)
            for name, result in self.each(names[first:] + names[:first], do).items():
                results[name].append(result)
        return {name: found for name, found in results.items() if name not in self.failed}


def measure_equal(engines: dict[str, Engine], requests: Requests, repeats: int) -> dict[str, Any]:
    """Prefill and decode of equal prompts.

    Prefill is a run of one new token. A decode step is the slope from that run to a long one: the difference of their times over the
    difference of their tokens. So every engine is charged in the same way for what it does besides running its model.

    Returns:
      "engines": name to medians and turns, "failed": name to reason.
    """
    turns = Turns(engines)
    length, new = len(requests.prompts[0]), requests.answers[0]

    def warm(engine: Engine) -> dict[str, Any]:
        long = engine.ask("run", **requests.fields())
        engine.ask("run", **requests.fields(1))
        return long

    def turn(engine: Engine) -> dict[str, float]:
        short = engine.ask("run", **requests.fields(1))["seconds"]
        long = engine.ask("run", **requests.fields())["seconds"]
        return {"prefill_seconds": short, "step_seconds": (long - short) / (new - 1), "total_seconds": long}

    warmed = turns.each(engines, warm)
    times = turns.repeat(repeats, turn)
    found = {}
    for name, seconds in times.items():
        cell = _medians(seconds, times.get(OURS, seconds), "prefill_seconds", "step_seconds", "total_seconds")
        found[name] = {
            **cell,
            "decode_tokens_per_second": requests.rows / cell["step_seconds"],
            "prefill_tokens_per_second": requests.rows * length / cell["prefill_seconds"],
            **_first(warmed, name),
        }
    return {"engines": found, "failed": turns.failed}


def measure_ragged(engines: dict[str, Engine], requests: Requests, repeats: int) -> dict[str, Any]:
    """All requests from the first prompt to the last token; the result is that of `measure_equal`, without its parts."""
    turns = Turns(engines)

    def turn(engine: Engine) -> dict[str, Any]:
        return engine.ask("run", **requests.fields())

    warmed = turns.each(engines, turn)
    times = {name: [{"total_seconds": run["seconds"]} for run in runs] for name, runs in turns.repeat(repeats, turn).items()}
    found = {}
    for name, seconds in times.items():
        cell = _medians(seconds, times.get(OURS, seconds), "total_seconds")
        speed = sum(requests.answers) / cell["total_seconds"]
        found[name] = {**cell, "tokens_per_second": speed, **_first(warmed, name)}
    return {"engines": found, "failed": turns.failed}


def _medians(turns: list[dict[str, float]], ours: list[dict[str, float]], *names: str) -> dict[str, Any]:
    """Medians, how many times as long as ours each took (median of the turns' ratios), and the turns."""
    medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
    ratios = {name: statistics.median(turn[name] / mine[name] for turn, mine in zip(turns, ours)) for name in names}
    return {**medians, "times_ours": ratios, "turns": turns}


def _first(warmed: dict[str, Any], name: str) -> dict[str, float]:
    out = {"first_run_seconds": warmed[name]["seconds"]}
    if OURS in warmed:
        out["same_tokens"] = same_tokens(warmed[OURS]["tokens"], warmed[name]["tokens"])
    return out
