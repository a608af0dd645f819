"""Decode of the same weights in jaxkv and in transformers on torch, side by side: `python -m benchmarks.against_transformers`.

Both get the same token ids and the same number of threads, in float32. They run in turns, so that other load on the machine affects
both. transformers runs in two ways, its own `generate` and a minimal loop over its model with a KV cache; the ratio is against the
faster of the two.
The model is saved by `jaxkv.save` and loaded by transformers from there, so the weights are the same to the bit.
"""

import argparse
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv.bench.measure import Runner, Workload, machine, table, threads
from jaxkv.model.decoder import Decoder

HEADER = ["batch", "jaxkv tok/s", "generate tok/s", "loop tok/s", "ratio to faster", "same tokens"]


class Torch:
    """transformers' model of the same weights.

    Args:
      folder: what `jaxkv.save` wrote.
      num_threads: of torch.
    """

    def __init__(self, folder: str, num_threads: int):
        import torch
        import transformers

        torch.set_num_threads(num_threads)
        self.torch = torch
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        known = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # renamed within transformers 5

    def generate(self, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        """Greedy tokens by `model.generate`, i64[batch, new_tokens]."""
        ids = self.torch.from_numpy(prompts).long()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].numpy()

    def loop(self, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
        """Greedy tokens by calling the model, i64[batch, new_tokens]."""
        ids, cache, tokens = self.torch.from_numpy(prompts).long(), None, []
        with self.torch.inference_mode():
            for _ in range(new_tokens):
                out = self.model(ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
                ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out[self.cache_name]
                tokens.append(ids)
        return self.torch.cat(tokens, dim=1).numpy()


def _step_seconds(run: Callable[[np.ndarray, int], np.ndarray], prompts: np.ndarray, work: Workload) -> float:
    times = []
    for new_tokens in (work.short, work.new_tokens):
        start = time.perf_counter()
        run(prompts, new_tokens)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (work.new_tokens - work.short)


def compare(model: Decoder, torch: Torch, work: Workload, repeats: int) -> dict[str, Any]:
    """Seconds per decode step of all three, in turns: medians, and the median of the turns' ratios.

    Args:
      model: the decoder.
      torch: the same weights.
      work: what to run.
      repeats: turns, after one that warms up.
    """
    runner = Runner(model, work)
    prompts = work.prompts(model.config.vocab_size)
    ours = np.asarray(runner.generate(work.new_tokens).tokens)[:, 0]
    same = float(np.mean(ours == torch.loop(prompts, work.new_tokens)))
    torch.generate(prompts, 2)
    turns = [
        {
            "jaxkv": runner.step(),
            "generate": _step_seconds(torch.generate, prompts, work),
            "loop": _step_seconds(torch.loop, prompts, work),
        }
        for _ in range(repeats)
    ]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    ratios = {name: statistics.median(turn[name] / turn["jaxkv"] for turn in turns) for name in ("generate", "loop")}
    return {
        "batch_size": work.batch_size,
        "step_seconds": medians,
        "ratios": ratios,
        "ratio": min(ratios.values()),
        "same_tokens": same,
        "turns": turns,
    }


def as_row(cell: dict[str, Any]) -> list[str]:
    """A cell's figures as the table shows them."""
    speeds = [f"{cell['batch_size'] / cell['step_seconds'][name]:,.1f}" for name in ("jaxkv", "generate", "loop")]
    return [str(cell["batch_size"]), *speeds, f"{cell['ratio']:.2f}", f"{cell['same_tokens']:.0%}"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch-sizes", type=lambda text: [int(x) for x in text.split(",")], default=[1, 8])
    parser.add_argument("--context-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=threads(), help="of both (default: all processors of this process)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads < threads():  # XLA takes as many threads as there are processors to run on when it starts
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    jax.config.update("jax_platforms", "cpu")
    model, tokenizer = jaxkv.load(args.model, dtype="float32")
    del tokenizer
    with tempfile.TemporaryDirectory() as folder:
        jaxkv.save(model, folder)
        torch = Torch(folder, args.threads)
    cells = []
    for batch in args.batch_sizes:
        print(f"batch {batch} ...", file=sys.stderr)
        cells.append(compare(model, torch, Workload(batch, args.context_length, args.new_tokens), args.repeats))
    report = {**machine(), "torch": torch.version, "model": args.model, "context_length": args.context_length, "cells": cells}
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.model}, float32, {args.threads} threads, jax {report['jax']}, {torch.version}")
    print(table(HEADER, [as_row(cell) for cell in cells]))


if __name__ == "__main__":
    main()
