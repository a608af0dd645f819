"""Does a larger pool make a step slower? `python -m jaxkv.bench.pool_size`: 1 and 50 times the pages needed.

It does whenever the pages are copied anywhere in the step, so this is the measured side of "no copy of pool size".
"""

import argparse
import json
import statistics
from typing import Any

import jaxkv
from jaxkv.bench.measure import Runner, Workload, machine, table
from jaxkv.config import pages_for
from jaxkv.model import Decoder


def compare(model: Decoder, work: Workload, *, factor: int, repeats: int) -> dict[str, Any]:
    """Seconds per decode step with both pools, measured in turns.

    Args:
      model: the decoder.
      work: what to run; its `num_pages` is replaced.
      factor: how many times the pages needed the large pool has.
      repeats: pairs of measurements; medians are returned, and the median of the pairs' ratios.
    """
    needed = work.batch_size * pages_for(work.context_length + work.new_tokens, work.page_size)
    sizes = [needed + 1, factor * needed + 1]
    runners = [Runner(model, Workload(work.batch_size, work.context_length, work.new_tokens, work.page_size, n)) for n in sizes]
    pairs = []
    for turn in range(repeats):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        times = {i: runners[i].step() for i in order}
        pairs.append((times[0], times[1]))
    return {
        "num_pages": sizes,
        "step_seconds": [statistics.median(pair[i] for pair in pairs) for i in (0, 1)],
        "ratio": statistics.median(large / small for small, large in pairs),
        "pairs": pairs,
    }


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
    print(f"large over small, median of {args.repeats} pairs: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
