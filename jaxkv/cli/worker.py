"""A computation on a second thread: the main thread writes what it gives, and so notices Ctrl-C and a closed pipe at once."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")

WORKER = "jaxkv worker"
"""Name of the thread that computes while the main thread writes."""


class Worker(Generic[Given, Result]):
    """Iterates over a generator on a thread of its own, and hands over what that gives.

    Iterating over the worker gives the same, raises what the generator raised, and leaves its return value in `result`.

    Args:
      work: whatever it yields must not be changed afterwards.
    """

    def __init__(self, work: Generator[Given, None, Result]):
        self.result: Result | None = None
        self._work = work
        self._given: queue.SimpleQueue[tuple[Given] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, daemon=True, name=WORKER).start()

    def stop(self) -> None:
        """Close the generator after what it gives next; iterating goes on to what it has given until then."""
        self._stop.set()

    def __iter__(self) -> Iterator[Given]:
        while (given := self._given.get()) is not None:
            yield given[0]
        self._given.put(None)  # whoever asks again must not wait
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._given.put((next(self._work),))
            self._work.close()
        except StopIteration as end:
            self.result = end.value
        except BaseException as error:  # raised again on the main thread
            self._error = error
        self._given.put(None)
