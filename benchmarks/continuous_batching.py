"""Continuous against static batches, the same engine for both: `python -m benchmarks.continuous_batching`.

Prompts whose answers differ in length are computed in a few rows. Continuous batching takes them all in one call and refills a row as
soon as it ends. Static batching takes as many prompts as there are rows, and each batch runs until its longest answer ends. Answers
end by `token_limits`, so the number of tokens is given and the time does not depend on the weights.
"""

import argparse
import json
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.bench.measure import machine, seconds, table
from jaxkv.model.decoder import Decoder

SHORTEST, LONGEST = 16, 256


def answer_lengths(count: int, spread: str, seed: int = 0) -> np.ndarray:
    """Tokens per answer, i32[count], from SHORTEST to LONGEST, both of them there.

    Args:
      count: answers, >= 2.
      spread: "log" (the logarithm is uniform: many short answers and a few long ones, as is usual in a chat) or "uniform".
      seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    if spread == "uniform":
        lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    else:
        lengths = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), count)).astype(int)
    lengths[rng.choice(count, 2, replace=False)] = SHORTEST, LONGEST
    return lengths.astype(np.int32)


class Comparison:
    """Both ways over the same prompts.

    Args:
      model: the decoder.
      limits: i32[num_prompts], tokens per answer; num_prompts is a multiple of `rows`.
      rows: places in the batch.
      prompt_length: tokens per prompt.
      page_size: tokens a page holds.
    """

    def __init__(self, model: Decoder, limits: np.ndarray, *, rows: int, prompt_length: int, page_size: int = 16):
        if len(limits) % rows:
            raise ValueError(f"{len(limits)} prompts do not make batches of {rows}")
        self.model, self.rows, self.page_size = model, rows, page_size
        rng = np.random.default_rng(1)
        prompts = rng.integers(0, model.config.vocab_size, (len(limits), prompt_length), np.int32)
        self.prompts, self.limits = jnp.asarray(prompts), jnp.asarray(limits)
        self.max_new = int(limits.max())

    def _generate(self, first: int, count: int) -> jaxkv.GenerateOutput:
        part = slice(first, first + count)
        return jaxkv.generate(
            self.model,
            self.prompts[part],
            max_new_tokens=self.max_new,
            eos_token_id=(),
            token_limits=self.limits[part],
            max_seqs=self.rows,
            page_size=self.page_size,
        )

    def continuous(self) -> list[jaxkv.GenerateOutput]:
        """All prompts at once."""
        return [self._generate(0, len(self.limits))]

    def static(self) -> list[jaxkv.GenerateOutput]:
        """One batch after the other."""
        return [jax.block_until_ready(self._generate(i, self.rows)) for i in range(0, len(self.limits), self.rows)]

    def measure(self, repeats: int) -> dict[str, Any]:
        """Steps, and medians of `repeats` runs in turns, after one that compiles."""
        ways = {"continuous": self.continuous, "static": self.static}
        first = {name: way() for name, way in ways.items()}
        tokens = {name: np.concatenate([np.asarray(out.tokens) for out in outs]) for name, outs in first.items()}
        same = float(np.mean(tokens["continuous"] == tokens["static"]))
        times = {name: [] for name in ways}
        for turn in range(repeats):
            for name in sorted(ways, reverse=turn % 2 == 1):
                times[name].append(seconds(ways[name]))
        steps = {name: sum(int(out.stats.steps) for out in outs) for name, outs in first.items()}
        total = int(np.sum(np.asarray(self.limits)))
        pairs = zip(times["continuous"], times["static"])
        return {
            "tokens": total,
            "same_tokens": same,
            "steps": steps,
            "tokens_per_second": {name: total / statistics.median(ts) for name, ts in times.items()},
            "steps_ratio": steps["continuous"] / steps["static"],
            "speed_ratio": statistics.median(static / continuous for continuous, static in pairs),
            "seconds": times,
        }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--spread", choices=("log", "uniform"), default="log", help="of the answers' lengths, 16 to 256")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, _ = jaxkv.load(args.model, dtype=args.dtype)
    limits = answer_lengths(args.prompts, args.spread)
    comparison = Comparison(model, limits, rows=args.rows, prompt_length=args.prompt_length, page_size=args.page_size)
    result = comparison.measure(args.repeats)
    if args.json:
        print(json.dumps({**machine(), **vars(args), **result}))
        return
    print(f"{args.model}, {args.prompts} prompts, answers of 16 to 256 tokens ({args.spread}), {args.rows} rows\n")
    rows = [
        [name, f"{result['steps'][name]:,}", f"{result['tokens_per_second'][name]:,.1f}"] for name in ("static", "continuous")
    ]
    rows.append(["ratio", f"{result['steps_ratio']:.2f}", f"{result['speed_ratio']:.2f}"])
    print(table(["batches", "steps", "tokens/s"], rows))
    print(f"\nsame tokens: {result['same_tokens']:.1%}")


if __name__ == "__main__":
    main()
