"""One engine in a process of its own: `python worker.py ADAPTER`, JSON lines in on stdin and out on stdout.

This file imports the standard library only, and an adapter imports the engine's own packages besides: each engine has an environment of
its own, most of them without jaxkv. `benchmarks.engines` is the other end.

    the worker's first line               {"version": ...} or {"missing": ...}
    {"do": "load", ...fields of Job}      {"seconds": ...}
    {"do": "run", "prompts": [[id]], "new_tokens": [n], "rows": r, "room": n}
                                          {"seconds": ..., "tokens": [[id]]}
    any failure                           {"error": ...}

An adapter is a file with a class `Engine`: a class attribute `static`, a string `version`, a constructor that takes a `Job`, and
`run(prompts, new_tokens, rows, room)`, which decodes greedily past end tokens and returns the new token ids of each prompt. A static
engine gets at most `rows` prompts at a time and the same number in all of `new_tokens`; surplus tokens are cut off here. Any other
engine keeps at most `rows` prompts in progress and refills them itself. `room` is the largest number of new tokens in any run of the
workload.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Job:
    """What an engine is loaded for.

    Attributes:
      model: a Hugging Face folder.
      dtype: "float32", "bfloat16" or "float16": of weights, activations and cache.
      threads: to compute with.
      rows: most prompts in progress at the same time.
      length: most tokens of a prompt and its answer.
      cache: folder for converted models; it belongs to these weights alone.
    """

    model: str
    dtype: str
    threads: int
    rows: int
    length: int
    cache: str

    def converted(self, name: str, convert: Callable[[str], object]) -> str:
        """The path `name` in the cache folder; where it is not there yet, `convert(path)` makes it."""
        target = Path(self.cache) / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as work:
                convert(str(Path(work) / name))  # moved when it is complete, so that a stopped conversion leaves nothing
                (Path(work) / name).rename(target)
        return str(target)


def adapter(path: Path) -> Any:
    """The module in a file."""
    here = Path(__file__).resolve().parent  # Python searches it first, and our file names could hide the engine's modules
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(engine: Any, prompts: list[list[int]], new_tokens: list[int], rows: int, room: int) -> dict[str, Any]:
    """Seconds of all prompts, and their new tokens."""
    start = time.perf_counter()
    if engine.static:
        tokens = []
        for first in range(0, len(prompts), rows):
            part = slice(first, first + rows)
            longest = max(new_tokens[part])
            tokens += engine.run(prompts[part], [longest] * len(prompts[part]), rows, room)
    else:
        tokens = engine.run(prompts, new_tokens, rows, room)
    seconds = time.perf_counter() - start
    cut = [[int(token) for token in row[:count]] for row, count in zip(tokens, new_tokens)]
    if [len(row) for row in cut] != new_tokens:
        raise RuntimeError(f"the engine made {[len(row) for row in cut]} tokens instead of {new_tokens}")
    return {"seconds": seconds, "tokens": cut}


def answer(module: Any, engine: Any, message: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The engine after a message, and the reply."""
    todo = message.pop("do")
    if todo == "load":
        start = time.perf_counter()
        engine = module.Engine(Job(**message))
        return engine, {"seconds": time.perf_counter() - start}
    if engine is None:
        raise RuntimeError("it is not loaded")
    return engine, run(engine, **message)


def one_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def main() -> None:
    """Answers until stdin ends."""
    if sys.platform == "linux":  # a stopped worker would not notice that its parent has ended
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print, also from C++, must not get between the replies

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        module = adapter(Path(sys.argv[1]))
    except ImportError as error:
        traceback.print_exc()
        say({"missing": one_line(error)})
        return
    say({"version": module.Engine.version})
    engine = None
    for line in sys.stdin:
        try:
            engine, reply = answer(module, engine, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": one_line(error)}
        say(reply)
    with contextlib.suppress(BrokenPipeError):
        replies.close()


if __name__ == "__main__":
    main()
