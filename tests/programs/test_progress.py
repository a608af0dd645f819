"""A fake compiler (jax's own events, sent by hand), a fake clock and a fake timer: nothing here waits."""

import contextlib
import io
import re
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from jaxkv.programs import progress, waiting_on_compiler
from jaxkv.programs.progress import COMPILES
from jaxkv.programs.watched import watched


class Compiler:
    """The clock and the timers of `progress`, and compilations that take as long as they are told."""

    def __init__(self):
        self.time, self.timers = 0.0, []
        outside = self

        class Timer:
            daemon = False

            def __init__(self, seconds: float, call: Callable[[], None]):
                self.due, self.call, self.on = outside.time + seconds, call, False

            def start(self) -> None:
                self.on = True
                outside.timers.append(self)

            def cancel(self) -> None:
                self.on = False

        self.Timer = Timer

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for timer in self.timers:
            if timer.on and timer.due <= self.time:
                timer.on = False
                timer.call()

    @contextlib.contextmanager
    def compile(self, seconds: float) -> Iterator[None]:
        jax.monitoring.record_scalar(COMPILES, self.time, fun_name="f")
        begin = self.time
        try:
            yield  # what happens meanwhile on this thread
            self.sleep(seconds)
        finally:
            jax.monitoring.record_event_duration_secs(COMPILES, self.time - begin, fun_name="f")

    def compiles(self, seconds: float) -> None:
        with self.compile(seconds):
            pass


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(progress, "Timer", made.Timer)
    monkeypatch.setattr(progress, "now", lambda: made.time)
    monkeypatch.setenv("JAXKV_PROGRESS", "1")
    return made


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_long_compilation_is_said_once_and_how_long_it_took(compiler: Compiler, capsys) -> None:
    with waiting_on_compiler("generate for 1 row"):
        compiler.compiles(5.0)
        compiler.sleep(100.0)  # running is no compilation
        compiler.compiles(4.0)
    begin, end = lines(capsys)
    assert begin.startswith("jaxkv: compiling generate for 1 row; this happens once")
    assert end == "jaxkv: compiled generate for 1 row after 9.0 s"


def test_it_is_said_while_it_compiles(compiler: Compiler, capsys) -> None:
    with waiting_on_compiler("x"), compiler.compile(0.0):
        compiler.sleep(1.9)
        assert lines(capsys) == []
        compiler.sleep(0.2)
        assert len(lines(capsys)) == 1
        compiler.sleep(50.0)
        assert lines(capsys) == []


@pytest.mark.parametrize(("seconds", "said"), [((0.9, 0.9), 0), ((0.9, 0.9, 0.3), 2)])
def test_seconds_add_up(compiler: Compiler, capsys, seconds: tuple[float, ...], said: int) -> None:
    with waiting_on_compiler("x"):
        for each in seconds:
            compiler.compiles(each)
            compiler.sleep(10.0)
    assert len(lines(capsys)) == said


def test_nothing_is_started_where_nothing_compiles(compiler: Compiler, capsys) -> None:
    with waiting_on_compiler("x"):
        compiler.sleep(100.0)
    compiler.compiles(100.0)  # nobody waits
    assert compiler.timers == []
    assert lines(capsys) == []


def test_the_outermost_of_nested_contexts_speaks(compiler: Compiler, capsys) -> None:
    with waiting_on_compiler("outer"):
        with waiting_on_compiler("inner"):
            compiler.compiles(3.0)
        assert len(lines(capsys)) == 1
        compiler.compiles(1.0)
    assert lines(capsys) == ["jaxkv: compiled outer after 4.0 s"]


def test_a_compilation_within_another_counts_once(compiler: Compiler, capsys) -> None:
    with waiting_on_compiler("x"), compiler.compile(2.0):
        compiler.compiles(3.0)
    assert lines(capsys)[-1] == "jaxkv: compiled x after 5.0 s"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_ends_it(compiler: Compiler, capsys, error: type[BaseException]) -> None:
    def fail() -> None:
        with waiting_on_compiler("x"), compiler.compile(0.0):
            compiler.sleep(3.0)
            raise error

    with pytest.raises(error):
        fail()
    assert lines(capsys)[-1] == "jaxkv: stopped compiling x after 3.0 s"
    with waiting_on_compiler("y"):
        compiler.compiles(1.0)
    assert lines(capsys) == []


def test_an_exception_soon_after_leaves_no_timer(compiler: Compiler, capsys) -> None:
    with pytest.raises(ValueError, match="soon"), waiting_on_compiler("x"), compiler.compile(0.0):
        raise ValueError("soon")
    compiler.sleep(100.0)
    assert lines(capsys) == []


def test_threads_are_told_apart(compiler: Compiler, capsys) -> None:
    def compile_elsewhere() -> None:
        compiler.compiles(10.0)

    with waiting_on_compiler("x"):
        thread = threading.Thread(target=compile_elsewhere)
        thread.start()
        thread.join()
    assert lines(capsys) == []

    def wait_elsewhere(name: str) -> None:
        with waiting_on_compiler(name):
            compiler.compiles(3.0)

    threads = [threading.Thread(target=wait_elsewhere, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
        thread.join()
    said = [" ".join(re.split(r"[ ;]", line)[1:3]) for line in lines(capsys)]
    assert said == ["compiling a", "compiled a", "compiling b", "compiled b"]


def test_real_programs_are_noticed_and_only_once(compiler: Compiler, capsys, monkeypatch) -> None:
    """On every jax that is supported a compilation begins with a scalar and ends with a duration, on the thread that waits."""
    monkeypatch.setattr(progress, "LONG", -1.0)

    def start_at_once(timer) -> None:
        compiler.timers.append(timer)
        timer.on = True

    monkeypatch.setattr(compiler.Timer, "start", start_at_once)
    run = jax.jit(lambda x: x * 3 + 1)
    for expected in (1, 0):
        compiler.timers.clear()
        with waiting_on_compiler("x") as watch:
            run(jnp.ones(7, jnp.float32)).block_until_ready()
            assert watch.depth == 0
        # the program, and what makes its argument
        assert (len(compiler.timers) >= expected) if expected else not compiler.timers
        assert all(not timer.on for timer in compiler.timers)


def test_inside_a_callers_jit_nothing_is_said(compiler: Compiler, capsys) -> None:
    @jax.jit
    def callers(x: jax.Array) -> jax.Array:
        with waiting_on_compiler("x"):
            out = jax.jit(lambda y: y * 5)(x)
        return out + 1

    x = jnp.ones(3, jnp.float32)
    compiler.timers.clear()
    callers(x).block_until_ready()
    assert compiler.timers == []


@pytest.mark.parametrize(
    ("variable", "terminal", "expected"),
    [(None, False, False), (None, True, True), ("0", True, False), ("1", False, True), ("", False, False)],
)
def test_who_watches(monkeypatch, variable: str | None, terminal: bool, expected: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", Stream())
    monkeypatch.delenv("JAXKV_PROGRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("JAXKV_PROGRESS", variable)
    assert watched() is expected


def test_a_notebook_watches(monkeypatch) -> None:
    iostream = pytest.importorskip("ipykernel.iostream")
    monkeypatch.delenv("JAXKV_PROGRESS", raising=False)
    stream = iostream.OutStream.__new__(iostream.OutStream)
    monkeypatch.setattr(type(stream), "closed", False)
    monkeypatch.setattr(type(stream), "isatty", lambda self: False)
    monkeypatch.setattr("sys.stderr", stream)
    seen = watched()
    monkeypatch.undo()
    assert seen


@pytest.mark.parametrize("error", [ValueError("I/O operation on closed file"), OSError(28, "No space left on device")])
def test_a_stderr_that_takes_nothing_is_no_error(compiler: Compiler, monkeypatch, error: Exception) -> None:
    class Broken(io.StringIO):
        tried = 0

        def write(self, text: str) -> int:
            self.tried += 1
            raise error

    stream, ended = Broken(), []
    monkeypatch.setattr("sys.stderr", stream)
    with waiting_on_compiler("x"):
        compiler.compiles(3.0)
        ended.append(stream.tried)
    assert (ended, stream.tried) == ([1], 2)  # a line when it took long, and one at the end


def test_the_way_to_keep_it_is_said_where_nothing_is_kept(compiler: Compiler, capsys, monkeypatch) -> None:
    kept = {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": True}
    monkeypatch.setattr(progress, "option", kept.get)
    for folder, said in ((None, r"keep_programs\(\)"), ("/somewhere", "kept for the next start")):
        kept["jax_compilation_cache_dir"] = folder
        with waiting_on_compiler("x"):
            compiler.compiles(3.0)
        assert re.search(said, lines(capsys)[0])
