"""`jaxkv bench decode`: prefill and decode speed over batch sizes and context lengths, next to the memory-bandwidth limit."""

import argparse
import json
import sys
from typing import Any

import jax

import jaxkv
from jaxkv.bench.measure import Runner, Workload, machine, memory_bandwidth, peak_memory, reset_peak_memory, step_bytes, table
from jaxkv.model.decoder import Decoder, parameters_nbytes

HEADER = ["batch", "context", "prefill tok/s", "decode tok/s", "ms/step", "limit tok/s", "% of limit", "compile s", "peak MiB"]


def measure_cell(model: Decoder, work: Workload, repeats: int) -> dict[str, Any]:
    """The measured figures of one workload.

    Args:
      model: the decoder.
      work: what to run.
      repeats: runs; medians are returned.

    Returns:
      Name to number; times in seconds, sizes in bytes.
    """
    reset_peak_memory()
    timing = Runner(model, work).timing(repeats)
    return {
        "batch_size": work.batch_size,
        "context_length": work.context_length,
        "prefill_tokens_per_second": work.batch_size * work.context_length / timing.prefill_seconds,
        "decode_tokens_per_second": work.batch_size / timing.step_seconds,
        "step_seconds": timing.step_seconds,
        "step_bytes": step_bytes(model, work),
        "compile_seconds": timing.compile_seconds,
        "peak_memory_bytes": peak_memory(),
    }


def with_limit(cell: dict[str, Any], bandwidth: float) -> dict[str, Any]:
    """A cell's figures and what the memory's bandwidth, in bytes/s, allows at best."""
    limit = cell["step_bytes"] / bandwidth
    return {
        **cell,
        "limit_tokens_per_second": cell["batch_size"] / limit,
        "bandwidth_share": limit / cell["step_seconds"],
    }


def as_row(cell: dict[str, Any]) -> list[str]:
    """A cell's figures as the table shows them."""
    return [
        str(cell["batch_size"]),
        str(cell["context_length"]),
        f"{cell['prefill_tokens_per_second']:,.0f}",
        f"{cell['decode_tokens_per_second']:,.1f}",
        f"{cell['step_seconds'] * 1e3:.2f}",
        f"{cell['limit_tokens_per_second']:,.1f}",
        f"{cell['bandwidth_share']:.0%}",
        f"{cell['compile_seconds']:.1f}",
        f"{cell['peak_memory_bytes'] / 2**20:,.0f}",
    ]


def run(args: argparse.Namespace) -> int:
    """The command; see `jaxkv bench decode --help`."""
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds would be those of reading a file
    model, _ = jaxkv.load(args.model, dtype=args.dtype)
    works = [
        Workload(batch, context, args.new_tokens, args.page_size)
        for context in args.context_lengths
        for batch in args.batch_sizes
    ]
    for work in works:
        work.check(model)
    bandwidth, cells = memory_bandwidth(), []
    for work in works:
        print(f"batch {work.batch_size}, context {work.context_length} ...", file=sys.stderr)
        cells.append(measure_cell(model, work, args.repeats))
        bandwidth = max(bandwidth, memory_bandwidth())  # on a shared machine a single measurement may be too low
    cells = [with_limit(cell, bandwidth) for cell in cells]
    report = {
        **machine(),
        "model": args.model,
        "dtype": model.config.dtype,
        "page_size": args.page_size,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "parameter_bytes": parameters_nbytes(model),
        "bandwidth_bytes_per_second": bandwidth,
        "cells": cells,
    }
    if args.json:
        print(json.dumps(report))
        return 0
    print(
        f"{args.model}, {report['dtype']}, {report['parameter_bytes'] / 2**20:,.0f} MiB of parameters, "
        f"pages of {args.page_size} tokens\n"
        f"{report['device']}, {report['threads']} threads, jax {report['jax']}, memory read at {bandwidth / 1e9:.1f} GB/s\n"
    )
    print(table(HEADER, [as_row(cell) for cell in cells]))
    print("\nlimit: every parameter and every key and value a row sees, read once per step at the speed above")
    return 0
