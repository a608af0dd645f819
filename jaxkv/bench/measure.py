"""What the benchmarks share: prompts, timing, memory and the machine's memory bandwidth.

A decode step is measured as a slope: the time of a long run minus the time of a short one, divided by the steps between them. Prefill,
the creation of the pool and the call itself are part of both runs and cancel. Both runs use one compiled program, because
`token_limits` is traced.
"""

import dataclasses
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.model.decoder import Decoder, parameters_nbytes, value

STREAM_BYTES = 2**29
"""Size of the array whose reading measures the memory bandwidth: well above any cache."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One cell of a benchmark's grid.

    Args:
      batch_size: rows.
      context_length: prompt tokens per row.
      new_tokens: tokens generated per row in the long run, >= 8.
      page_size: tokens a page holds.
      num_pages: pages in the pool; None is as many as needed.
    """

    batch_size: int
    context_length: int
    new_tokens: int = 64
    page_size: int = 16
    num_pages: int | None = None

    @property
    def short(self) -> int:
        """New tokens of the short run."""
        return max(2, self.new_tokens // 4)

    def check(self, model: Decoder) -> None:
        """Raise ValueError if the model has no room for it."""
        tokens, room = self.context_length + self.new_tokens, model.config.max_seq_len
        if tokens > room:
            raise ValueError(
                f"context {self.context_length} and {self.new_tokens} new tokens are {tokens}, but the model allows {room}"
            )

    def prompts(self, vocab_size: int, seed: int = 0) -> np.ndarray:
        """Random token ids, i32[batch_size, context_length]."""
        return np.random.default_rng(seed).integers(0, vocab_size, (self.batch_size, self.context_length), np.int32)


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call, its arrays awaited."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a workload took.

    Attributes:
      compile_seconds: of the first call, above a later one.
      prefill_seconds: from the call to every row's first token.
      step_seconds: per decode step.
    """

    compile_seconds: float
    prefill_seconds: float
    step_seconds: float


class Runner:
    """Runs one workload again and again, in one compiled program."""

    def __init__(self, model: Decoder, work: Workload):
        work.check(model)
        self.model, self.work = model, work
        self._prompts = jnp.asarray(work.prompts(model.config.vocab_size))
        self._lengths = jnp.full(work.batch_size, work.context_length, jnp.int32)
        self._first = self.run(1)

    def generate(self, new_tokens: int) -> jaxkv.GenerateOutput:
        """Greedy tokens, `new_tokens` per row."""
        limits = jnp.full(self.work.batch_size, new_tokens, jnp.int32)
        return jaxkv.generate(
            self.model,
            self._prompts,
            self._lengths,
            max_new_tokens=self.work.new_tokens,
            eos_token_id=(),
            token_limits=limits,
            page_size=self.work.page_size,
            num_pages=self.work.num_pages,
            max_seqs=self.work.batch_size,
        )

    def run(self, new_tokens: int) -> float:
        """Seconds of `new_tokens` per row."""
        return seconds(lambda: self.generate(new_tokens))

    def step(self) -> float:
        """Seconds per decode step, by one long and one short run."""
        work = self.work
        short, long = self.run(work.short), self.run(work.new_tokens)
        return (long - short) / (work.new_tokens - work.short)

    def timing(self, repeats: int) -> Timing:
        """Medians of `repeats` runs."""
        prefill = statistics.median(self.run(1) for _ in range(repeats))
        step = statistics.median(self.step() for _ in range(repeats))
        return Timing(self._first - prefill, prefill, step)


def step_bytes(model: Decoder, work: Workload) -> int:
    """Bytes a decode step cannot avoid reading: the parameters once, and the keys and values a row sees, at mid-run."""
    c = model.config
    looked_up = [model.position_embed] + ([model.embed] if model.lm_head is not None else [])
    parameters = parameters_nbytes(model) - sum(value(p).nbytes for p in looked_up if p is not None)
    held = work.context_length + (work.short + work.new_tokens) // 2
    seen = sum(min(held, c.window(layer) or held) for layer in range(c.num_layers))
    return parameters + work.batch_size * seen * 2 * c.num_kv_heads * c.head_dim * jnp.dtype(c.dtype).itemsize


def memory_bandwidth(nbytes: int = STREAM_BYTES, repeats: int = 7) -> float:
    """Bytes per second of reading a large array, the best of two ways and of `repeats` runs.

    Summing the rows and multiplying by a vector both read the array once, on all threads. Which of the two a compiler implements
    better differs by platform.
    """
    columns = 4096
    x = jax.random.normal(jax.random.key(0), (nbytes // columns // 4, columns), jnp.float32)
    one = jnp.ones((columns,), jnp.float32)
    ways = [jax.jit(lambda x, one: jnp.sum(x, axis=1)), jax.jit(lambda x, one: x @ one)]
    best = min(seconds(lambda way=way: way(x, one)) for way in ways for _ in range(repeats))
    return x.nbytes / best


def reset_peak_memory() -> None:
    """Forget the peak that `peak_memory` returns, where the operating system supports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Most bytes in use at once: of the accelerator's memory if there is one, else of this process."""
    on_device = jax.devices()[0].memory_stats()
    if on_device and "peak_bytes_in_use" in on_device:
        return int(on_device["peak_bytes_in_use"])
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    device = jax.devices()[0]
    return {"platform": device.platform, "device": device.device_kind, "threads": threads(), "jax": jax.__version__}


def threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns flush right, in plain text."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [header, *rows])
