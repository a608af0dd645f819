"""Does a larger pool make a step slower? `python -m jaxkv.bench.pool_size`: 1 and 50 times the pages needed.

It does whenever the pages are copied anywhere in the step, so this is the measured side of "no copy of pool size".
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from typing import Any

import jax.numpy as jnp

import jaxkv
from jaxkv.bench.measure import Workload, machine, table
from jaxkv.config import pages_for
from jaxkv.model import Decoder

TURN = 16
"""Steps between two looks at the clock."""


def step_seconds(model: Decoder, work: Workload) -> list[float]:
    """Seconds per step of each turn of a run but the first and the last.

    Turn by turn, and not as the slope between a long run and a short one: a large pool takes a second to create, and its jitter
    would not cancel.
    """
    ends: list[float] = []
    prompts = jnp.asarray(work.prompts(model.config.vocab_size))
    tokens = jaxkv.stream(
        model,
        prompts,
        max_new_tokens=work.new_tokens,
        page_size=work.page_size,
        num_pages=work.num_pages,
        steps_per_turn=TURN,
        on_turn=lambda *_: ends.append(time.perf_counter()),
    )
    for _ in tokens:
        pass
    return [(after - before) / TURN for before, after in itertools.pairwise(ends[:-1])]


def compare(model: Decoder, work: Workload, *, factor: int, repeats: int) -> dict[str, Any]:
    """Seconds per decode step with both pools, measured in turns.

    Args:
      model: the decoder.
      work: what to run; its `num_pages` is replaced. At least 4 * TURN new tokens.
      factor: how many times the pages needed the large pool has.
      repeats: runs with each pool; medians over all their turns are returned, and the ratio of the medians.
    """
    if work.new_tokens < 4 * TURN:
        raise ValueError(f"new_tokens must be at least {4 * TURN}, got {work.new_tokens}")
    needed = work.batch_size * pages_for(work.context_length + work.new_tokens, work.page_size)
    sizes = [needed + 1, factor * needed + 1]
    works = [dataclasses.replace(work, num_pages=n) for n in sizes]
    for each in works:
        step_seconds(model, each)  # compiles
    times: list[list[float]] = [[], []]
    for turn in range(repeats):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            times[i] += step_seconds(model, works[i])
    small, large = (statistics.median(t) for t in times)
    return {"num_pages": sizes, "step_seconds": [small, large], "ratio": large / small, "turns": times}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--factor", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, _ = jaxkv.load(args.model, dtype=args.dtype)
    work = Workload(args.batch_size, args.context_length, args.new_tokens, args.page_size)
    result = compare(model, work, factor=args.factor, repeats=args.repeats)
    if args.json:
        print(json.dumps({**machine(), "model": args.model, "batch_size": args.batch_size, **result}))
        return
    rows = [[str(n), f"{s * 1e3:.2f}"] for n, s in zip(result["num_pages"], result["step_seconds"])]
    print(table(["pages", "ms/step"], rows))
    print(f"large over small, median of {args.repeats} runs each: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
