"""How fast on a GPU, or what the compiler says without one.

    python -m pallas_kernels.tools.bench              a GPU: time and bandwidth; none: the compile report
    python -m pallas_kernels.tools.bench --report     the compile report on any machine
    python -m pallas_kernels.tools.bench --quick      the first case of each only

The last line is JSON. On a GPU every figure is a median over runs, and bandwidth stands beside that of a plain copy measured in
the same process. The compile report's bandwidth and time columns are ceilings computed from data-sheet numbers, not measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention
from pallas_kernels.choice import mosaic_refusal
from pallas_kernels.tools.compile_report import CompileCase, compile_cases, missing_tools
from pallas_kernels.tools.targets import TARGETS, Target


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One decode step: `batch` rows of `context` tokens each."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"

    def page_bytes(self) -> int:
        """Bytes of K and V that must be read once."""
        pages = self.batch * -(-self.context // self.page_size)
        return 2 * pages * self.page_size * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


GRID = (
    BenchCase(8, 4096),
    BenchCase(1, 8192),
    BenchCase(64, 1024),
    BenchCase(64, 4096),
    BenchCase(32, 2048, page_size=64),
    BenchCase(32, 2048, head_dim=64),
    BenchCase(32, 2048, heads=9, kv_heads=3, head_dim=64),
    BenchCase(32, 2048, head_dim=256, heads=16, kv_heads=4),
    BenchCase(32, 2048, dtype="float16"),
    BenchCase(32, 2048, dtype="float32"),
)


def kernels_for(case: BenchCase) -> tuple[str, ...]:
    """The kernels that take a case: Triton all of them, Mosaic from jax 0.11 on those it does not refuse."""
    return ("triton",) if mosaic_refusal(case.head_dim, case.page_size, case.dtype) else ("triton", "mosaic")


def seconds(call: Callable, *arguments, runs: int = 20) -> float:
    """Median seconds of one call, after two warm-up calls."""
    for _ in range(2):
        jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(size: int = 2**28) -> float:
    """Bytes/s of a plain copy on the default device, bytes read and bytes written both counted."""
    x = jnp.ones(size // 4, jnp.float32)
    return 2 * size / seconds(jax.jit(lambda x: x + 1.0), x)


def make_arrays(case: BenchCase) -> tuple[jax.Array, ...]:
    """(q, k_pages, v_pages, block_tables, lengths) with shuffled pages."""
    per_row = -(-case.context // case.page_size)
    pages = 1 + case.batch * per_row
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (pages, case.kv_heads, case.page_size, case.head_dim)
    k, v = (jax.random.normal(key, shape, jnp.dtype(case.dtype)) for key in keys[:2])
    q = jax.random.normal(keys[2], (case.batch, case.heads, case.head_dim), jnp.dtype(case.dtype))
    order = np.random.default_rng(0).permutation(np.arange(1, pages)).reshape(case.batch, per_row)
    return q, k, v, jnp.asarray(order, jnp.int32), jnp.full((case.batch,), case.context, jnp.int32)


def jax_own(q, k, v, tables, lengths):
    """jax's own deprecated kernel; its pages are [kv_heads, num_pages, page_size, head_dim], and it scales nothing."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as own

    return own(q, k, v, tables, lengths)


def cudnn_dense(q, k, v, tables, lengths):
    """cuDNN's attention over contiguous keys, gathered outside the timing: no pages, so a bound and not a rival."""
    del tables
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths, implementation="cudnn")


def contenders(case: BenchCase, arrays: tuple[jax.Array, ...], names: tuple[str, ...]) -> dict[str, tuple[Callable, tuple]]:
    """What is timed: our implementations by name, and beside them jax's own kernel and cuDNN on a GPU."""

    def ours(name):
        return jax.jit(lambda *a: paged_attention(*a, implementation=name))

    made = {name: (ours(name), arrays) for name in names}
    if jax.default_backend() == "gpu":
        q, k, v, tables, lengths = arrays
        swapped = tuple(jnp.array(x.swapaxes(0, 1)) for x in (k, v))
        made["jax_own"] = (jax.jit(jax_own), (q, *swapped, tables, lengths))
        shape = (case.batch, -1, case.kv_heads, case.head_dim)
        dense = tuple(jnp.array(x[tables].swapaxes(2, 3).reshape(shape)) for x in (k, v))
        made["cudnn_dense"] = (jax.jit(cudnn_dense), (q, *dense, tables, lengths))
    return made


def measure(cases: tuple[BenchCase, ...], names: tuple[str, ...] | None = None) -> dict:
    """Times every case with the implementations named, or all that take it; other contenders that cannot run are listed so."""
    copy = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}: a copy moves {copy / 1e9:.0f} GB/s")
    rows = []
    for case in cases:
        ours = (*kernels_for(case), "xla") if names is None else names
        for name, (call, arguments) in contenders(case, make_arrays(case), ours).items():
            row = dataclasses.asdict(case) | {"name": name}
            try:
                row["seconds"] = seconds(call, *arguments)
                row["bytes_per_second"] = case.page_bytes() / row["seconds"]
                row["of_copy"] = row["bytes_per_second"] / copy
                print(f"{case}\n    {name:12} {row['seconds'] * 1e6:9.1f} us  {row['of_copy']:6.1%} of the copy")
            except Exception as error:  # another project's kernel may refuse a shape: that is a result, and is shown
                if name in ours:
                    raise
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                print(f"{case}\n    {name:12} cannot run: {row['error'][:80]}")
            rows.append(row)
    return {"kind": "measured", "device": jax.devices()[0].device_kind, "copy_bytes_per_second": copy, "rows": rows}


def occupancy(target: Target, registers: int, threads: int, shared: int) -> float:
    """Upper bound on resident threads over the target's 2048 per multiprocessor, from registers and shared memory."""
    per_block = -(-registers // 8) * 8 * threads
    blocks = min(65536 // per_block, 2048 // threads, 32, target.shared_per_core // (shared + 1024))
    return blocks * threads / 2048


def report(cases: tuple[BenchCase, ...]) -> dict:
    """The compile report for all targets, as a table and as data."""
    pairs = [(arch, name, case) for arch in TARGETS for case in cases for name in kernels_for(case)]
    todo = [
        CompileCase(
            arch, implementation=name, dtype=case.dtype, page_dtype=case.dtype, head_dim=case.head_dim, page_size=case.page_size,
            batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, tokens=case.context,
        )
        for arch, name, case in pairs
    ]  # fmt: skip
    titles = f"{'target':8}{'kernel':8}{'dtype':10}{'dim':>4}{'page':>5}{'batch':>6}{'context':>8}"
    print(titles + "  registers spills  shared occupancy   MB read  ceiling us")
    rows = []
    for result, (arch, name, case) in zip(compile_cases(todo), pairs):
        if "error" in result:
            raise RuntimeError(f"{case} for {arch}: {result['error']}")
        kernel = next(k for k in result["kernels"] if k["name"] == "paged_attention")
        target, moved = TARGETS[arch], case.page_bytes()
        flops = 4 * case.batch * case.context * case.heads * case.head_dim
        ceiling = max(moved / target.bandwidth, flops / target.bf16_flops)
        row = (
            dataclasses.asdict(case)
            | kernel
            | {"target": arch, "implementation": name, "bytes": moved, "ceiling_seconds": ceiling}
        )
        row["occupancy_bound"] = occupancy(target, kernel["registers"], kernel["threads"], kernel["shared_bytes"])
        rows.append(row)
        print(
            f"{arch:8}{name:8}{case.dtype:10}{case.head_dim:4}{case.page_size:5}{case.batch:6}{case.context:8}  {kernel['registers']:9}"
            f"{kernel['spill_bytes']:7}{kernel['shared_bytes']:8}{row['occupancy_bound']:10.0%}{moved / 1e6:10.1f}{ceiling * 1e6:12.1f}"
        )
    return {"kind": "compiled, never run", "rows": rows}


def main(arguments: list[str]) -> int:
    """Runs the bench; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tools.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", action="store_true", help="the compile report, also where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="the first case only")
    options = parser.parse_args(arguments)
    cases = GRID[:1] if options.quick else GRID
    facts = {"jax": jax.__version__, "python": platform.python_version()}
    if jax.default_backend() == "gpu" and not options.report:
        result = measure(cases)
    elif (reason := missing_tools()) is not None:
        print(f"no GPU to measure on, and nothing to compile with: {reason}", file=sys.stderr)
        print(json.dumps(facts | {"kind": "nothing", "reason": reason}))
        return 1
    else:
        result = report(cases)
    print(json.dumps(facts | result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
