"""jaxkv and other engines on the same weights, token ids and threads, in turns: `python -m benchmarks.compare`.

Each engine is a process in an environment of its own (`--peer vllm=path/to/its/bin/python`). All decode greedily and do not stop at end
tokens. Every figure is shown beside the limit of the machine: bytes over the memory's bandwidth or multiply-adds over the speed of a
large matrix product, both measured in the same run.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxkv
from benchmarks.compare_report import plot, print_report
from benchmarks.engines import OURS, PEERS, Choice, Engine, EngineError, known, start
from benchmarks.limits import Costs, Speed, measure_speed
from benchmarks.workloads import ANSWER_RANGE, PROMPT_RANGE, equal, measure_equal, measure_ragged, ragged
from jaxkv.bench.measure import machine, threads
from jaxkv.cli.main import OneLineParser
from jaxkv.config import ModelConfig
from jaxkv.model.decoder import Decoder
from jaxkv.weights.default_model import cache_folder

DTYPES = ("float32", "bfloat16", "float16")


def _numbers(text: str) -> tuple[int, ...]:
    """Positive integers with commas between them; none for an empty text."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be positive integers with commas between them, got {text!r}")
    return tuple(map(int, parts))


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if wrong := [name for name in names if name not in DTYPES]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(DTYPES)}, got {wrong[0]!r}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", default="default", metavar="NAME", help="what jaxkv.load takes (default: SmolLM2-135M)")
    parser.add_argument(
        "--dtypes", type=_dtypes, default=("float32", "bfloat16"), metavar="D,D", help="(default: float32,bfloat16)"
    )
    for name, default, what in (
        ("--batch-sizes", "1,8,32,64", "rows of the grid; '' leaves the grid out"),
        ("--prompt-lengths", "128,1024", "tokens per prompt of the grid"),
        ("--ragged-rows", "16,64", "rows for the ragged requests; '' leaves them out"),
    ):
        parser.add_argument(name, type=_numbers, default=_numbers(default), metavar="N,N", help=f"{what} (default: {default})")
    for name, default, what in (
        ("--ragged-requests", 64, "ragged requests"),
        ("--new-tokens", 64, "tokens decoded per row of the grid, at least 2"),
        ("--repeats", 3, "turns, after one that warms up; the median counts"),
        ("--timeout", 1800, "seconds an engine may take for one run"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--threads", type=int, metavar="N", help="of every engine (default: all processors of this process)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PYTHON]",
        help=f"an engine and the interpreter it is installed for; again for more (default: those of {', '.join(known())} "
        "that are installed here)",
    )
    parser.add_argument(
        "--cache", metavar="FOLDER", help="for saved and converted models (default: in the user's cache folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="also draw the figures (needs matplotlib)")


def check(args: argparse.Namespace) -> list[Choice]:
    """The peers asked for.

    Raises:
      ValueError: a value is out of range, a peer or its interpreter is unknown, or matplotlib is missing.
    """
    for name, least in (("new_tokens", 2), ("repeats", 1), ("ragged_requests", 1), ("timeout", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.threads is not None and not 1 <= args.threads <= threads():
        raise ValueError(f"--threads must be 1 to {threads()}, the processors of this process, got {args.threads}")
    if not (args.batch_sizes and args.prompt_lengths) and not args.ragged_rows:
        raise ValueError("nothing to run: no --batch-sizes or --prompt-lengths, and no --ragged-rows")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    if args.plot and not Path(args.plot).resolve().parent.is_dir():
        raise ValueError(f"--plot {args.plot}: no such folder")
    choices = [Choice.parse(text) for text in args.peer or known()]
    names = [choice.name for choice in choices]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--peer {min(twice)} is there twice")
    return choices


def longest(args: argparse.Namespace) -> int:
    """Most tokens of a prompt and its answer."""
    grid = [length + args.new_tokens for length in args.prompt_lengths if args.batch_sizes]
    return max([*grid, *([PROMPT_RANGE[1] + ANSWER_RANGE[1]] if args.ragged_rows else [])])


def saved(model: Decoder, tokenizer: Any, cache: Path) -> Path:
    """The model's folder in the cache, named after its content; what engines convert from it is put beside it."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model.", dir=cache) as work:
        folder = Path(work) / "hf"
        jaxkv.save(model, folder, tokenizer=tokenizer)
        digest = hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")) + [folder / "config.json"]:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        target = cache / digest.hexdigest()[:16] / "hf"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # another run has put it there meanwhile
                folder.rename(target)
    return target


@contextlib.contextmanager
def running(choices: list[Choice], args: argparse.Namespace) -> Iterator[tuple[dict[str, Engine], dict[str, str]]]:
    """The engines, jaxkv first, and the reason for each that is not installed; all processes end with the `with` block."""
    ours = Choice(OURS, PEERS / f"{OURS}.py", sys.executable)
    engines, skipped = start([ours, *choices], asked=bool(args.peer), threads=args.threads or threads(), timeout=args.timeout)
    try:
        yield engines, skipped
    finally:
        for engine in engines.values():
            engine.close()


def compare_dtype(args: argparse.Namespace, choices: list[Choice], dtype: str) -> dict[str, Any]:
    """All workloads in one dtype."""
    model, tokenizer = jaxkv.load(args.model, dtype=dtype)
    if longest(args) > model.config.max_seq_len:
        raise ValueError(f"{longest(args)} tokens of prompt and answer, but the model allows {model.config.max_seq_len}")
    with running(choices, args) as (engines, skipped):
        print(f"{dtype}: {', '.join(engines)}", file=sys.stderr)
        cache = (Path(args.cache) if args.cache else cache_folder() / "bench").resolve()
        folder, costs, config = saved(model, tokenizer, cache), Costs(model), model.config
        del model
        job = {
            "model": str(folder),
            "dtype": dtype,
            "threads": args.threads or threads(),
            "rows": max([*args.batch_sizes, *args.ragged_rows]),
            "length": longest(args),
            "cache": str(folder.parent),
        }
        failed, loaded = {}, {}
        for name, engine in engines.items():
            print(f"  loading {name} ...", file=sys.stderr)
            try:
                loaded[name] = {"version": engine.version, "load_seconds": engine.ask("load", **job)["seconds"]}
            except EngineError as error:
                print(f"  {name} failed: {error}", file=sys.stderr)
                failed[name] = str(error)
        if OURS in failed:
            raise ValueError(f"jaxkv does not load: {failed[OURS]}")
        engines = {name: engine for name, engine in engines.items() if name in loaded}
        speed, cells = measure_cells(args, engines, config, dtype)
    for cell in cells:
        add_limits(cell, costs, speed)
    return {
        "dtype": dtype,
        "bandwidth_bytes_per_second": speed.bandwidth,
        "matmul_multiply_adds_per_second": speed.multiply_adds,
        "parameter_bytes": costs.parameter_bytes,
        "engines": loaded,
        "skipped": skipped,
        "failed": failed,
        "cells": cells,
    }


def measure_cells(
    args: argparse.Namespace, engines: dict[str, Engine], config: ModelConfig, dtype: str
) -> tuple[Speed, list[dict[str, Any]]]:
    """The machine's speed, looked at again and again, and the figures of all workloads."""
    speed, cells = measure_speed(dtype), []
    for length in args.prompt_lengths:
        for batch in args.batch_sizes:
            print(f"{dtype}, batch {batch}, prompt {length} ...", file=sys.stderr)
            found = measure_equal(engines, equal(config, batch, length, args.new_tokens), args.repeats)
            cells.append({"kind": "grid", "batch_size": batch, "prompt_length": length, "new_tokens": args.new_tokens, **found})
            print(progress(found, "decode_tokens_per_second", "prefill_tokens_per_second"), file=sys.stderr)
            speed = measure_speed(dtype, speed)
    for rows in args.ragged_rows:
        print(f"{dtype}, {args.ragged_requests} ragged requests, {rows} at a time ...", file=sys.stderr)
        requests = ragged(config, args.ragged_requests, rows)
        found = measure_ragged(engines, requests, args.repeats)
        lengths = {"prompt_lengths": [len(prompt) for prompt in requests.prompts], "answer_lengths": requests.answers}
        cells.append({"kind": "ragged", "rows": rows, **lengths, **found})
        print(progress(found, "tokens_per_second"), file=sys.stderr)
        speed = measure_speed(dtype, speed)
    return speed, cells


def progress(found: dict[str, Any], *names: str) -> str:
    """A line for each engine as soon as a cell is done, so that a long run which is stopped leaves its figures."""
    lines = [f"  {name}: " + " / ".join(f"{engine[key]:,.1f}" for key in names) for name, engine in found["engines"].items()]
    return "\n".join(lines + [f"  ({' / '.join(names).replace('_', ' ')})"])


def add_limits(cell: dict[str, Any], costs: Costs, speed: Speed) -> None:
    """Add a cell's limits, and the share of them that each engine reaches, to its figures."""
    if cell["kind"] == "ragged":
        cell["limit"] = speed.limit(costs.ragged(cell["prompt_lengths"], cell["answer_lengths"], cell["rows"]))
        for engine in cell["engines"].values():
            engine["share"] = cell["limit"]["seconds"] / engine["total_seconds"]
        return
    batch, length = cell["batch_size"], cell["prompt_length"]
    cell["prefill_limit"] = speed.limit(costs.batch_prefill(batch, length))
    cell["decode_limit"] = speed.limit(costs.step(batch, length, cell["new_tokens"]))
    for engine in cell["engines"].values():
        engine["prefill_share"] = cell["prefill_limit"]["seconds"] / engine["prefill_seconds"]
        engine["decode_share"] = cell["decode_limit"]["seconds"] / engine["step_seconds"]


def run(args: argparse.Namespace) -> int:
    """The command; see `python -m benchmarks.compare --help`."""
    choices = check(args)
    if args.threads is not None:  # XLA takes as many threads as there are processors to run on when it starts
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    report = {
        **machine(),
        "threads": args.threads or threads(),
        "model": args.model,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "dtypes": [compare_dtype(args, choices, dtype) for dtype in args.dtypes],
    }
    if args.plot:
        plot(report, args.plot)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.compare`; the exit status, 2 after a mistake of the caller's."""
    parser = OneLineParser(prog="python -m benchmarks.compare", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
