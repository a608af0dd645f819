"""What a step's time must not depend on: `python -m benchmarks.growth`.

The number of pages in the pool, the width of the block tables and the number of waiting prompts are made many times larger, one after
the other, and the time of a step is compared. If a step copied the pool anywhere, its time would grow with the pool: this program
measures what `tests/test_compiled.py` checks in the compiled program.
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
from jaxkv.model.decoder import Decoder

TURN = 16
"""Steps between two readings of the clock."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A workload, and the sizes of what surrounds it.

    Attributes:
      work: prompts, rows and tokens.
      room: new tokens that the block tables have room for; at least the workload's.
      waiting: prompts that wait for a row, beside those that run.
    """

    work: Workload
    room: int
    waiting: int = 0

    def turns(self, model: Decoder) -> list[float]:
        """Seconds per step of each turn of a run, except the first and the last.

        The slope between a long run and a short one would not do: a large pool takes a second to create, and the variation of that
        second would not cancel.
        """
        work, ends = self.work, []
        every = dataclasses.replace(work, batch_size=work.batch_size + self.waiting)
        tokens = jaxkv.stream(
            model,
            jnp.asarray(every.prompts(model.config.vocab_size)),
            max_new_tokens=self.room,
            eos_token_id=(),
            token_limits=jnp.full(every.batch_size, work.new_tokens, jnp.int32),
            page_size=work.page_size,
            num_pages=work.num_pages,
            max_seqs=work.batch_size,
            steps_per_turn=TURN,
            on_turn=lambda *_: ends.append(time.perf_counter()),
        )
        decoded = work.new_tokens // TURN  # turns in which nothing but the first prompts runs
        for _ in tokens:
            if len(ends) >= decoded:
                break
        return [(after - before) / TURN for before, after in itertools.pairwise(ends[:decoded])]


def variants(work: Workload, what: str, factor: int) -> tuple[Variant, Variant]:
    """The same workload with little and with `factor` times as much of `what`: "pool", "table" or "waiting"."""
    needed = work.batch_size * pages_for(work.context_length + work.new_tokens, work.page_size)
    small = Variant(dataclasses.replace(work, num_pages=needed + 1), work.new_tokens)
    if what == "pool":
        return small, dataclasses.replace(small, work=dataclasses.replace(work, num_pages=factor * needed + 1))
    if what == "table":
        pool = dataclasses.replace(work, num_pages=factor * needed + 1)  # one longest sequence has to fit into it
        room = factor * (work.context_length + work.new_tokens) - work.context_length
        return Variant(pool, work.new_tokens), Variant(pool, room)
    return dataclasses.replace(small, waiting=64), dataclasses.replace(small, waiting=64 * factor)


def compare(model: Decoder, pair: tuple[Variant, Variant], repeats: int) -> dict[str, Any]:
    """Seconds per decode step of both, measured in turns.

    Args:
      model: the decoder.
      pair: what to run; at least 4 * TURN new tokens.
      repeats: runs of each; medians over all their turns are returned, and the ratio of the medians.
    """
    if pair[0].work.new_tokens < 4 * TURN:
        raise ValueError(f"new_tokens must be at least {4 * TURN}, got {pair[0].work.new_tokens}")
    for each in pair:
        each.turns(model)  # compiles
    times: list[list[float]] = [[], []]
    for turn in range(repeats):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            times[i] += pair[i].turns(model)
    small, large = (statistics.median(t) for t in times)
    return {"step_seconds": [small, large], "ratio": large / small, "turns": times}


WHAT = {"pool": "pages in the pool", "table": "columns of the block tables", "waiting": "prompts that wait"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*WHAT, []], default=[], help="all, unless some are named")
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--factor", type=int, help="how many times as much (default: 50 for the pool, 16, 64)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, _ = jaxkv.load(args.model, dtype=args.dtype)
    work = Workload(args.batch_size, args.context_length, args.new_tokens, args.page_size)
    factors = {"pool": 50, "table": 16, "waiting": 64}
    results = {}
    for what in args.what or WHAT:
        factor = args.factor or factors[what]
        results[what] = {"factor": factor, **compare(model, variants(work, what, factor), args.repeats)}
    if args.json:
        print(json.dumps({**machine(), "model": args.model, "batch_size": args.batch_size, **results}))
        return
    rows = [
        [WHAT[what], f"x {r['factor']}", *(f"{s * 1e3:.2f}" for s in r["step_seconds"]), f"{r['ratio']:.3f}"]
        for what, r in results.items()
    ]
    print(table(["many times more", "", "ms/step", "then", "ratio"], rows))


if __name__ == "__main__":
    main()
