"""Says on stderr that the compiler is waited for, once that takes long, and how long it took.

jax tells listeners when a compilation begins (as a scalar with the event's name) and when it has ended (as a duration), on the thread
that compiles; reading a program from the cache on disk counts, too. So nothing is measured, and no thread started, where nothing
compiles. Inside somebody else's jit nothing is compiled before that is traced to its end, and so nothing is said.
"""

import threading
import time
from types import TracebackType
from typing import Any

import jax

from jaxkv.programs.options import option
from jaxkv.programs.watched import say, watched

LONG = 2.0
"""Seconds of compilation, in total, from which on it is worth a line."""

COMPILES = "/jax/core/compile/backend_compile_duration"
"""What jax calls the compilation of one program."""

# Replaced in tests.
now = time.monotonic
Timer = threading.Timer


class waiting_on_compiler:  # in small letters, since it is used as a function: `with waiting_on_compiler("..."):`
    """A context around calls that may compile: after two seconds of compilation, one line on stderr says that and what.

    Costs a microsecond where nothing compiles. Threads are told apart: what counts is what compiles on the thread that entered.
    Contexts may be nested: the outermost speaks. Nothing is said unless stderr is a terminal or a notebook's, or the environment
    variable JAXKV_PROGRESS is "1" ("0" silences all).

    Args:
      what: is compiled, as it goes on after "compiling": "generate for 1 row, prompts of up to 256 tokens".
    """

    __slots__ = ("announced", "began", "depth", "lock", "seconds", "timer", "what")

    def __init__(self, what: str):
        self.what = what
        self.depth = 0  # compilations that have begun and not ended: one may need another
        self.seconds = self.began = 0.0
        self.announced, self.timer = False, None
        self.lock = threading.Lock()  # the timer speaks on a thread of its own

    def __enter__(self) -> "waiting_on_compiler":
        if getattr(_here, "watch", None) is None:
            _listen()
            _here.watch = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if getattr(_here, "watch", None) is not self:
            return
        _here.watch = None
        if self.depth:  # jax says nothing about the end of a compilation while the interpreter ends
            self._ends(all_of_them=True)
        with self.lock:
            said, self.announced = self.announced, False
        if said:
            done = "compiled" if kind is None else "stopped compiling"
            say(f"{done} {self.what} after {self.seconds:.1f} s")

    def _begins(self) -> None:
        self.depth += 1
        if self.depth == 1 and watched():
            self.began = now()
            self.timer = Timer(max(LONG - self.seconds, 0.0), self._announce)
            self.timer.daemon = True
            self.timer.start()

    def _ends(self, *, all_of_them: bool = False) -> None:
        self.depth = 0 if all_of_them else self.depth - 1
        if self.depth:
            return
        with self.lock:
            timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()
            self.seconds += now() - self.began

    def _announce(self) -> None:
        with self.lock:
            if self.timer is None or self.announced:  # the compilation ended just now, or it was said for an earlier one
                return
            self.announced = True
            say(f"compiling {self.what}; this happens once{_hint()}")  # within the lock: before the line that ends it


_here = threading.local()
"""`watch`: the outermost context of this thread, if there is one."""


def _hint() -> str:
    # Whoever keeps programs need not be told how.
    kept = option("jax_compilation_cache_dir") and option("jax_enable_compilation_cache")
    return ", and is kept for the next start" if kept else " in a process (jaxkv.keep_programs() keeps it for the next)"


def _begun(event: str, value: float | int, **about: Any) -> None:
    watch = getattr(_here, "watch", None)
    if watch is not None and event == COMPILES:
        watch._begins()


def _ended(event: str, duration_secs: float, **about: Any) -> None:
    watch = getattr(_here, "watch", None)
    if watch is not None and event == COMPILES and watch.depth:
        watch._ends()


_listening = threading.Lock()


def _listen() -> None:
    """Register the two listeners, once a process."""
    if _listening.acquire(blocking=False):
        jax.monitoring.register_scalar_listener(_begun)
        jax.monitoring.register_event_duration_secs_listener(_ended)
