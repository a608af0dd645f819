"""Engines to compare with, each a worker process in an environment of its own; `worker.py` is the other end."""

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxkv

PEERS = Path(__file__).with_name("peers")
WORKER = PEERS.with_name("worker.py")
OURS = "jaxkv"


class EngineError(Exception):
    """An engine that could not do what it was asked, in one line."""


class Missing(EngineError):
    """An engine that is not installed."""


def known() -> list[str]:
    """Names of the peers that have an adapter in `benchmarks/peers`."""
    return sorted(path.stem for path in PEERS.glob("*.py") if path.stem != OURS)


@dataclasses.dataclass(frozen=True)
class Choice:
    """An engine and where it is installed.

    Attributes:
      name: as it is shown.
      adapter: file with its `Engine`.
      python: interpreter of its environment.
    """

    name: str
    adapter: Path
    python: str

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """From "vllm", "vllm=path/to/bin/python", or with the path of an adapter file for the name.

        Raises:
          ValueError: no such adapter or interpreter.
        """
        name, _, python = text.partition("=")
        adapter = Path(name) if name.endswith(".py") else PEERS / f"{name}.py"
        if not name.endswith(".py") and name not in known():
            raise ValueError(f"no peer {name!r}: there are {', '.join(known())}, or the path of an adapter's .py file")
        if not adapter.is_file():
            raise ValueError(f"no adapter at {adapter}")
        python = python or sys.executable
        if shutil.which(python) is None:
            raise ValueError(f"no interpreter {python!r} for {name}")
        return cls(adapter.stem, adapter.resolve(), os.path.abspath(shutil.which(python) or python))


class Engine:
    """A worker process. It is stopped between requests, so that it cannot disturb the measurement of another engine.

    Args:
      choice: which engine.
      threads: for the libraries that take their number from the environment.
      timeout: seconds an answer may take.

    Raises:
      Missing: its packages are not there.
      EngineError: it did not start.
    """

    def __init__(self, choice: Choice, *, threads: int, timeout: int):
        self.name, self.timeout = choice.name, timeout
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        environment.setdefault("JAX_PLATFORMS", "cpu")  # the peers compute on the CPU
        if choice.name == OURS:  # also in a checkout that is not installed
            root = str(Path(jaxkv.__file__).resolve().parent.parent)
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._folder = tempfile.TemporaryDirectory(prefix="jaxkv-bench-")
        self._log = Path(self._folder.name) / "stderr"
        self._buffer = b""
        empty = Path(self._folder.name) / "empty"  # some engines import from the folder they are started in
        empty.mkdir()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [choice.python, str(WORKER), str(choice.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=empty,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
        try:
            hello = self._reply()
            if "missing" in hello:
                raise Missing(hello["missing"])
            self.version: str = hello["version"]
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def ask(self, todo: str, **fields: Any) -> dict[str, Any]:
        """What the worker answers.

        Raises:
          EngineError: it failed, ended or took too long. It can be asked again only if it failed.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": todo, **fields}).encode() + b"\n")
            reply = self._reply()
        except BrokenPipeError:
            raise EngineError(self._death()) from None
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply

    def close(self) -> None:
        """Ends the process and all processes it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _reply(self) -> dict[str, Any]:
        out, end = self._process.stdout, time.monotonic() + self.timeout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self._signal(signal.SIGKILL)
                    raise EngineError(f"no answer within {self.timeout} s")
                data = out.read(1 << 20)
                if not data:
                    raise EngineError(self._death())
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _death(self) -> str:
        status = self._process.wait()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended with status {status}" + (f": {said[-1].strip()}" if said else "")


def start(choices: Sequence[Choice], *, asked: bool, threads: int, timeout: int) -> tuple[dict[str, Engine], dict[str, str]]:
    """Worker processes of all engines that are installed.

    Args:
      choices: which ones.
      asked: the user named them, so each of them has to be installed.
      threads, timeout: see `Engine`.

    Returns:
      Name to engine, and name to reason of those that are not installed.

    Raises:
      ValueError: an engine that was asked for is not installed.
    """
    engines: dict[str, Engine] = {}
    skipped: dict[str, str] = {}
    try:
        for choice in choices:
            try:
                engines[choice.name] = Engine(choice, threads=threads, timeout=timeout)
            except EngineError as error:
                if asked or choice.name == OURS or not isinstance(error, Missing):
                    raise ValueError(f"{choice.name} does not run in {choice.python}: {error}") from None
                skipped[choice.name] = str(error)
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise
    return engines, skipped
