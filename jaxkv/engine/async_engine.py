"""`AsyncEngine`: an engine for asyncio. One thread steps it; coroutines add requests and iterate over their outputs.

coroutine  --add, abort-->  inbox  -->  thread: take the inbox, step  -->  queue of each request  -->  coroutine
"""

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxkv.engine.engine import Engine
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.params import SamplingParams


class EngineDied(RuntimeError):
    """The thread that steps the engine has ended because of an exception, its cause."""


class AsyncEngine:
    """Answers requests of many coroutines, of one event loop or several.

    Args:
      engine: is stepped by a thread of this object's from now on; nobody else may touch it but through `call`.

    Attributes:
      engine: as given.
      error: what has ended the thread, or None.
    """

    def __init__(self, engine: Engine):
        self.engine, self.error = engine, None
        self._inbox: list[Callable[[], None]] = []
        self._queues: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._names = itertools.count()
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self),), name="jaxkv-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self.error is None and not self._closed

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, request_id: str | None = None, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, as its `output_kind` says. Whoever stops iterating, or is cancelled, aborts it.

        Args:
          prompt, params, **more: as for `Engine.add_request`.
          request_id: a name that no unfinished request has; by default made up.

        Raises:
          ValueError: as `Engine.add_request`.
          EngineDied: the engine has ended, now or before.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        name = f"async-{next(self._names)}" if request_id is None else request_id

        def add() -> None:
            try:
                if name in self._queues:
                    raise ValueError(f"there is an unfinished request {name!r} already: take another name")
                self.engine.add_request(name, prompt, params, **more)
                self._queues[name] = loop, queue
            except Exception as error:
                _tell(loop, queue, error)

        self._post(add)
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, BaseException):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(name)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within a step. Its iterator gets a last output, with the finish reason "abort"."""
        if self.alive:
            self._post(lambda: self.engine.abort(request_id))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """The result of a function of the engine, run by its thread between two steps.

        Raises:
          EngineDied: the engine has ended.
          Exception: whatever the function raises.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()

        def run() -> None:
            try:
                _tell(loop, queue, (True, function(self.engine)))
            except Exception as error:
                _tell(loop, queue, (False, error))

        with self._changed:
            self._queues[f"call-{next(self._names)}"] = loop, queue  # told where the thread ends
        self._post(run)
        result = await queue.get()
        with self._changed:
            self._queues = {name: waiting for name, waiting in self._queues.items() if waiting[1] is not queue}
        good, value = (False, result) if isinstance(result, BaseException) else result
        if not good:
            raise value
        return value

    def close(self) -> None:
        """End the thread, after the step it is in; unfinished requests get an `EngineDied`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, todo: Callable[[], None]) -> None:
        with self._changed:
            if not self.alive:
                raise EngineDied("the engine has ended") from self.error
            self._inbox.append(todo)
            self._changed.notify_all()

    def _turn(self) -> bool:
        """What is in the inbox, and then a step; waits where there is neither. False ends the thread."""
        with self._changed:
            if not (self._inbox or self._closed or self.engine.has_unfinished()):
                self._changed.wait(timeout=1.0)  # looks up now and then, whether this object is still wanted
            if self._closed:
                return False
            todo, self._inbox = self._inbox, []
        for action in todo:
            action()
        if self.engine.has_unfinished():
            for output in self.engine.step():
                waiting = self._queues.get(output.request_id)
                if output.finished:
                    self._queues.pop(output.request_id, None)
                if waiting is not None:
                    _tell(*waiting, output)
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._closed, self.error = True, error
            todo, self._inbox = self._inbox, []
        for action in todo:  # they have queues of their own, which are told below, or tell themselves
            action()
        died = EngineDied("the engine has ended" if error is None else f"the engine has ended: {error!r}")
        died.__cause__ = error
        with self._changed:
            queues, self._queues = self._queues, {}
        for loop, queue in queues.values():
            _tell(loop, queue, died)


def _tell(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, what: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, what)


def _run(owner: "weakref.ref[AsyncEngine]") -> None:
    """The thread, which does not keep an engine alive that nobody uses any more."""
    error = None
    while (engine := owner()) is not None:
        try:
            if not engine._turn():
                break
        except BaseException as raised:
            error = raised
            break
        del engine
    if engine is not None:
        engine._end(error)
