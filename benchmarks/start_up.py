"""The time from a command to its first token: `python -m benchmarks.start_up`.

Every part is timed in processes of its own: import, load, and the first `generate`, once with an empty compilation cache and once
with the cache that the first one left behind. Beside them whole processes, from their start to their first token: jaxkv cold and warm,
transformers on torch with the same weights, and llama.cpp, each where it is installed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxkv.bench.measure import table

HEADER = ["", "seconds", "beside"]

_IMPORT = "import time; start = time.perf_counter(); import {names}; print(time.perf_counter() - start)"


def import_seconds(names: str, repeats: int) -> float:
    """Seconds of importing packages in a fresh interpreter, the median of `repeats`."""
    runs = [subprocess.run([sys.executable, "-c", _IMPORT.format(names=names)], capture_output=True, text=True, check=True)
            for _ in range(repeats)]  # fmt: skip
    return statistics.median(float(run.stdout) for run in runs)


def read_seconds(model: str, dtype: str | None) -> dict[str, float]:
    """Seconds of `jaxkv.load`, of a second `jaxkv.load`, which finds transformers' modules imported, and of reading the files.

    The files are in the system's cache from the start, so that no disk is measured.
    """
    import jax

    import jaxkv
    from jaxkv.weights.loading import find

    path = find(model)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        file.read_bytes()

    def load() -> float:
        start = time.perf_counter()
        loaded, _ = jaxkv.load(model, dtype=dtype)
        jax.block_until_ready(jax.tree.leaves(loaded))
        return time.perf_counter() - start

    first, again = load(), load()
    start = time.perf_counter()
    for file in files:
        file.read_bytes()
    read = time.perf_counter() - start
    return {"load": first, "load_again": again, "read": read, "file_bytes": sum(file.stat().st_size for file in files)}


def first_generate(model: str, dtype: str | None, cache: str) -> dict[str, float]:
    """Seconds of tracing and compiling one `generate` (16 prompt tokens, 16 new ones) with the compilation cache in `cache`."""
    import jax
    import jax.numpy as jnp

    import jaxkv

    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_enable_compilation_cache", True)
    loaded, _ = jaxkv.load(model, dtype=dtype)

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(jaxkv.generate(loaded, jnp.ones((1, 16), jnp.int32), max_new_tokens=16, eos_token_id=()))
        return time.perf_counter() - start

    first = run()
    return {"first": first - run()}


PROMPT = [[504, 2365, 282, 260, 1418, 314, 253, 1123]]
"""Token ids that every engine is given."""


def first_token_of_jaxkv(model: str, dtype: str | None, cache: str, started: float) -> dict[str, float]:
    """Seconds from `started` (of `time.time`) until the package is imported, the model loaded and the first token there."""
    import jaxkv

    jaxkv.keep_programs(cache)
    imported = time.time()
    loaded, _ = jaxkv.load(model, dtype=dtype)
    ready = time.time()
    next(jaxkv.stream(loaded, PROMPT, max_new_tokens=16, eos_token_id=()))
    return _parts(started, imported, ready)


def first_token_of_transformers(folder: str, dtype: str | None, cache: str, started: float) -> dict[str, float]:
    """The same of transformers, on torch."""
    import torch
    from transformers import AutoModelForCausalLM

    imported = time.time()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype or "float32"))
    ready = time.time()
    loaded.generate(torch.tensor(PROMPT), max_new_tokens=1, do_sample=False)
    return _parts(started, imported, ready)


def first_token_of_llama_cpp(path: str, dtype: str | None, cache: str, started: float) -> dict[str, float]:
    """The same of llama.cpp, by the GGUF file's own weights."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    imported = time.time()
    loaded = llama_cpp.Llama(path, n_ctx=1024, verbose=False)
    ready = time.time()
    next(loaded.generate(PROMPT[0], temp=0.0))
    return _parts(started, imported, ready)


def _parts(started: float, imported: float, ready: float) -> dict[str, float]:
    """Seconds of each part of a process whose first token is there now, given when (by `time.time`) it was started, had its package
    imported, and had its model loaded."""
    now = time.time()
    return {"import": imported - started, "load": ready - imported, "token": now - ready, "all": now - started}


def first_tokens(model: str, dtype: str | None, repeats: int) -> dict[str, dict[str, float]]:
    """Of each engine the parts of the fastest of `repeats` processes, jaxkv's warm ones after a cold one; engines take turns."""
    import jaxkv
    from jaxkv.weights.loading import find

    path = find(model)
    with tempfile.TemporaryDirectory() as place:
        folder, cache = str(path), str(Path(place) / "cache")
        turns: dict[str, Callable[[], dict[str, float]]] = {}
        if find_spec("torch") is not None:
            if path.is_file():
                loaded, tokenizer = jaxkv.load(model, dtype=dtype)
                folder = str(Path(place) / "model")
                jaxkv.save(loaded, folder, tokenizer=tokenizer)
            turns["transformers"] = lambda: _timed("first_token_of_transformers", folder, dtype, cache)
        if find_spec("llama_cpp") is not None and path.suffix == ".gguf":
            turns["llama.cpp"] = lambda: _timed("first_token_of_llama_cpp", str(path), dtype, cache)
        found = {"jaxkv, cold": [_timed("first_token_of_jaxkv", model, dtype, cache)]}
        turns["jaxkv, warm"] = lambda: _timed("first_token_of_jaxkv", model, dtype, cache)
        for _ in range(repeats):
            for name, turn in turns.items():
                found.setdefault(name, []).append(turn())
    return {name: min(runs, key=lambda run: run["all"]) for name, runs in found.items()}


def _timed(name: str, model: str, dtype: str | None, cache: str) -> dict[str, float]:
    """One of the functions above in a process that begins now."""
    return _in_process(name, model, dtype, cache, time.time())


def measure(model: str, dtype: str | None, repeats: int) -> dict[str, Any]:
    """All figures, in seconds; see `as_rows` for what they are."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_in_process("first_generate", model, dtype, cache)["first"] for _ in range(2))
    return {
        "first_tokens": first_tokens(model, dtype, repeats),
        "import_jax": import_seconds("jax, flax.nnx, transformers", repeats),
        "import_jaxkv": import_seconds("jax, flax.nnx, transformers, jaxkv", repeats),
        **_in_process("read_seconds", model, dtype),
        "compile_cold": cold,
        "compile_warm": warm,
    }


def _in_process(name: str, *args: Any) -> dict[str, float]:
    """Calls a function of this file in a fresh interpreter."""
    code = f"import json, sys; from benchmarks.start_up import {name} as f; print(json.dumps(f(*json.loads(sys.argv[1]))))"
    made = subprocess.run([sys.executable, "-c", code, json.dumps(args)], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise ValueError(f"{name} failed, see above")
    return json.loads(made.stdout.splitlines()[-1])


def as_rows(figures: dict[str, Any]) -> list[list[str]]:
    """The figures as the table shows them, each beside what it is held against."""
    f = figures
    return [
        ["import jaxkv", f"{f['import_jaxkv'] - f['import_jax']:.2f}", f"{f['import_jax']:.2f} for jax, flax and transformers"],
        ["load the model", f"{f['load']:.2f}", f"{f['read']:.2f} to read its {f['file_bytes'] / 1e6:.0f} MB"],
        ["the same again", f"{f['load_again']:.2f}", "with the modules of transformers that the first load imports"],
        ["compile generate", f"{f['compile_cold']:.1f}", "with an empty compilation cache"],
        ["the same again", f"{f['compile_warm']:.1f}", f"{f['compile_warm'] / f['compile_cold']:.0%} of it, from the cache"],
        *(
            [
                f"first token, {name}",
                f"{x['all']:.2f}",
                f"import {x['import']:.2f}, load {x['load']:.2f}, generate {x['token']:.2f}",
            ]
            for name, x in f["first_tokens"].items()
        ),
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args.model, args.dtype, args.repeats)
    print(json.dumps(figures) if args.json else table(HEADER, as_rows(figures)))


if __name__ == "__main__":
    main()
