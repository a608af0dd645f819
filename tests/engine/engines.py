"""A tiny model for engines and what `generate` says to the same prompts: programs are compiled once for all tests of a process."""

import functools
from typing import Any

import numpy as np
from decoders import decoder, with_ends

import jaxkv
from jaxkv.engine import LLM, Engine, SamplingParams

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "block_size": 4, "num_gpu_blocks_override": 60}


@functools.cache
def model() -> jaxkv.Decoder:
    return with_ends(decoder(), (7,))


def llm(**options: Any) -> LLM:
    return LLM(model(), **{**OPTIONS, **options})


def engine(**options: Any) -> Engine:
    return Engine(model(), **{**OPTIONS, **options})


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model().config.vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@functools.cache
def _generated(prompt: tuple[int, ...], max_new_tokens: int, deterministic: bool) -> tuple[list[int], list[float]]:
    out = jaxkv.generate(model(), [list(prompt)], max_new_tokens=max_new_tokens, deterministic=deterministic)
    n = int(out.lengths[0, 0])
    return np.asarray(out.tokens)[0, 0, :n].tolist(), np.asarray(out.logprobs)[0, 0, :n].tolist()


def generated(prompt: list[int], max_new_tokens: int, *, deterministic: bool = False) -> tuple[list[int], list[float]]:
    """Greedy tokens of `generate`, and their log-probabilities."""
    return _generated(tuple(prompt), max_new_tokens, deterministic)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def run(engine: Engine, most: int = 10_000) -> dict[str, Any]:
    """Step until nothing is left to do, checking after each step; the last output of each request."""
    last = {}
    for _ in range(most):
        if not engine.has_unfinished():
            return last
        for output in engine.step():
            last[output.request_id] = output
        engine.check()
    raise AssertionError(f"not done after {most} steps: {engine}")
