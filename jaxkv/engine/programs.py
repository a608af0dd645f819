"""The compiled programs of an engine: what is needed now is compiled now, what will be needed in a thread behind the work.

A step never waits for the compiler where a larger program that is compiled can run it; the one that was missed first is compiled first.
"""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from jaxkv.engine.packing import Shape
from jaxkv.programs import waiting_on_compiler


class Programs:
    """Programs by the sizes that they are made for.

    Args:
      compile: makes the program of given sizes; called from two threads, never for the same sizes twice.

    Attributes:
      compilations: programs made so far.
    """

    def __init__(self, compile: Callable[[Shape], Callable]):
        self._compile = compile
        self._programs: dict[Shape, Future[Callable]] = {}
        self._pending: deque[Shape] = deque()  # those that nobody has begun to compile
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.compilations = 0
        atexit.register(_close, weakref.ref(self))  # the interpreter must not end in the middle of a compilation

    def get(self, shape: Shape) -> tuple[Shape, Callable]:
        """The smallest program that is compiled and can run a step of these sizes, and its own sizes; where there is none, the very one."""
        with self._lock:
            able = [made for made, program in self._programs.items() if program.done() and made.serves(shape)]
            best = min(able, key=_cost, default=None)
            if shape not in self._programs:
                self._want(shape)
            mine = best is None and shape in self._pending
            if mine:
                self._pending.remove(shape)
            program = self._programs[best or shape]
        if mine:
            self._make(shape)
        with waiting_on_compiler(_title(shape)):
            return best or shape, program.result()

    def want(self, shapes: Iterable[Shape]) -> None:
        """Compile these behind the work, in this order."""
        with self._lock:
            for shape in shapes:
                if shape not in self._programs:
                    self._want(shape)

    def wait(self) -> None:
        """Until everything that is wanted is compiled.

        Raises:
          Exception: whatever the compiler raised.
        """
        for program in list(self._programs.values()):
            program.result()

    def close(self) -> None:
        """Nothing more is compiled; waits for the compilation that has begun."""
        with self._lock:
            self._closed = True
            thread, pending = self._thread, list(self._pending)
            self._pending.clear()
            for shape in pending:
                self._programs.pop(shape).cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _want(self, shape: Shape) -> None:
        self._programs[shape] = Future()
        self._pending.append(shape)
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), name="jaxkv-compile", daemon=True)
            self._thread.start()

    def _make(self, shape: Shape) -> None:
        program = self._programs[shape]
        try:
            with waiting_on_compiler(_title(shape)):
                made = self._compile(shape)
            self.compilations += 1
            program.set_result(made)
        except BaseException as error:
            with self._lock:
                del self._programs[shape]  # whoever needs it tries again, and learns the reason
            program.set_exception(error)

    def _make_next(self) -> bool:
        """Compile the next one, in the thread; False where there is none."""
        with self._lock:
            if not self._pending:
                self._thread = None
                return False
            shape = self._pending.popleft()
        self._make(shape)
        return True


def _work(programs: "weakref.ref[Programs]") -> None:
    """The thread, which does not keep an engine alive that nobody uses any more."""
    while (owner := programs()) is not None and owner._make_next():
        del owner


def _close(programs: "weakref.ref[Programs]") -> None:
    owner = programs()
    if owner is not None:
        owner.close()


def _cost(shape: Shape) -> tuple[int, ...]:
    """What decides which of several programs runs a step: the tokens it computes, then what it does with their logits."""
    tokens = shape.rows + shape.pieces * shape.width
    return (tokens, shape.sampled, shape.alternatives, shape.prompt_alternatives, shape.banned)


def _title(shape: Shape) -> str:
    chunk = f" and {shape.pieces * shape.width} tokens of prompts" if shape.pieces else ""
    return f"a step of {shape.rows} rows{chunk}"
