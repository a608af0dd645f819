"""The engine: requests come and go, each step moves all of them on. What is below `LLM` and the server.

    add_request ---> Scheduler ---> Batch ---> Runner (device) ---> Drawn ---> Answers ---> RequestOutput
                        ^                                                        |
                        '--- a sequence has ended: its row and pages are free <--'

A step of the engine dispatches the next step of the model, and then reads the results of the one before.
"""

import time
from collections.abc import Sequence as List
from typing import Any

import jax
from jaxtyping import Array

from jaxkv.engine.answers import Answers
from jaxkv.engine.intake import Asked, Intake
from jaxkv.engine.memory import log_pool
from jaxkv.engine.options import EngineOptions
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.params import SamplingParams
from jaxkv.engine.prefix_cache import root_name
from jaxkv.engine.runner import Dispatched, Runner
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import Request, Sequence
from jaxkv.model.decoder import Decoder, check_decoder


class Engine:
    """Requests in, tokens out, step by step.

    Args:
      model: the decoder.
      tokenizer: a transformers tokenizer; None where prompts are token ids and no text is wanted.
      **options: see `EngineOptions`.

    Attributes:
      scheduler: owner of the queue, the rows and the pages.
      runner: owner of what is on the device.
      weights_version: how often the weights have been replaced.
      asleep: whether the pages' memory has been given back.

    Raises:
      ValueError: an option is out of range, or there is no memory for pages.
    """

    def __init__(self, model: Decoder, tokenizer: Any = None, **options: Any):
        check_decoder(model)
        self.options = EngineOptions(**options)
        self.tokenizer, self.config = tokenizer, model.config
        numerics, self._limits = self.options.numerics(), self.options.limits(model.config)
        device = next(iter(jax.tree.leaves(model)[0].devices()))
        sizes = self.options.sizes(model.config, self._limits, device)
        log_pool(sizes, model.config)
        self.scheduler = Scheduler(sizes.num_pages, self._limits)
        self.runner = Runner(model, sizes, self._limits, numerics)
        self.weights_version, self.asleep = 0, False
        self._intake = Intake(model.config, tokenizer, self.options, self._limits)
        self._answers = Answers(tokenizer)
        self._requests: dict[str, Request] = {}
        self._dispatched: Dispatched | None = None
        self._ended: list[Request] = []  # outside of a step
        self._number = 0

    def __repr__(self) -> str:
        waiting, running, pool = len(self.scheduler.waiting), len(self.scheduler.running), self.scheduler.cache.pool
        return f"Engine({waiting} sequences waiting, {running} running, {pool.held} of {pool.capacity} pages held)"

    def add_request(
        self,
        request_id: str,
        prompt: str | List[int],
        params: Any = None,
        *,
        prompt_text: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """A request waits from now on.

        Args:
          request_id: a name that no unfinished request has.
          prompt: a text, or token ids.
          params: a `SamplingParams`; None is vLLM's defaults.
          prompt_text: the text of token ids, to be given back with the outputs.
          priority: less is served earlier.
          cache_salt: prompts under different salts share nothing in the prefix cache.

        Raises:
          ValueError: the name is taken, the prompt is empty, too long or holds a token that the model does not know, or the request could
            never be computed; nothing has happened then.
        """
        if request_id in self._requests:
            raise ValueError(f"there is an unfinished request {request_id!r} already: take another name")
        params = SamplingParams() if params is None else params
        asked = Asked(request_id, prompt_text, priority, cache_salt)
        request = self._intake.request(prompt, params, asked, self._number, self.weights_version)
        self.scheduler.check_fits(len(request.prompt_token_ids), request.limit)
        self._number += 1
        self._requests[request_id] = request
        self._answers.begin(request)
        self.scheduler.add(request)
        return request

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._requests) or self._dispatched is not None or bool(self._ended)

    def step(self) -> list[RequestOutput]:
        """Dispatch a step of the model, and read the one before.

        A step that fails (no memory, an exception in it) ends the requests that took part with the finish reason "error"; the others are
        computed again.

        Returns:
          What is new of the requests that have got on, as their `output_kind` says.

        Raises:
          RuntimeError: the engine sleeps.
        """
        if self.asleep and self.scheduler.has_work():
            raise RuntimeError("the engine sleeps and has requests to answer: wake_up() first")
        before, self._dispatched = self._dispatched, None
        touched = {request.request_id: request for request in self._ended}
        self._ended = []
        batch = self.scheduler.schedule()
        if batch is not None:
            now = time.monotonic()
            for sequence in batch.sequences:
                metrics = sequence.request.metrics
                metrics.first_scheduled_time = metrics.first_scheduled_time or now
            try:
                self._dispatched = self.runner.dispatch(batch)
            except Exception as error:
                touched |= self._fail(batch.sequences, error)
        if before is not None:
            touched |= self._read(before)
        outputs = []
        for request in touched.values():
            if request.finished:
                self._forget(request)
            output = self._answers.output(request)
            if output is not None:
                outputs.append(output)
        return outputs

    def _read(self, dispatched: Dispatched) -> dict[str, Request]:
        """Take in what a step has drawn; the requests that got on."""
        try:
            rows, pieces = self.runner.read(dispatched)
        except Exception as error:
            later, self._dispatched = self._dispatched, None
            sequences = [*dispatched.batch.sequences, *(later.batch.sequences if later else [])]
            return self._fail(sequences, error)
        touched, batch, now = {}, dispatched.batch, time.monotonic()
        if pieces is not None:
            self._answers.about_prompts(batch, pieces, dispatched.width)
        place = {id(sequence): row for row, sequence in enumerate(batch.sequences)}
        for sequence in batch.drawing:
            if sequence.finish_reason is not None:
                continue
            row, request = place[id(sequence)], sequence.request
            self.scheduler.read(sequence, int(rows.token[row]))
            self._answers.token(sequence, rows, row)
            request.metrics.first_token_time = request.metrics.first_token_time or now
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
            touched[request.request_id] = request
        return touched

    def _fail(self, sequences: List[Sequence], error: BaseException) -> dict[str, Request]:
        """End the requests of a step that failed; all others are computed again, since nobody can rely on what their pages hold."""
        touched = {}
        for sequence in sequences:
            request = sequence.request
            if not request.finished:
                self._end(request, "error")
                self._answers.failed(request, error)
            touched[request.request_id] = request
        self.scheduler.preempt_all()
        if not self.runner.has_pages:
            self.runner.make_pages()
        return touched

    def _end(self, request: Request, reason: str) -> None:
        for sequence in request.samples:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self.scheduler.finish(sequence)
                self._answers.ended(sequence)

    def _forget(self, request: Request) -> None:
        request.metrics.finished_time = request.metrics.finished_time or time.monotonic()
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def abort(self, request_id: str | List[str]) -> None:
        """End requests; those that are unknown or finished are left alone. Their pages are free at once; their last outputs, with the
        finish reason "abort", come with the next step."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            request = self._requests.get(name)
            if request is not None:
                self._end(request, "abort")
                self._forget(request)
                self._ended.append(request)

    def recover(self) -> None:
        """Put the engine in order after an exception that came at any place, such as Ctrl-C: what was in the cache is computed again."""
        self._dispatched = None
        requests = [request for request in self._requests.values() if not request.finished]
        self.scheduler = Scheduler(self.runner.sizes.num_pages, self._limits)
        for request in requests:
            for sequence in request.samples:
                sequence.leave_row()
                sequence.in_flight = 0
                if sequence.finish_reason is None:
                    self.scheduler.wait(sequence)
        if not self.asleep and not self.runner.has_pages:
            self.runner.make_pages()

    def drain(self) -> None:
        """Read the step that is under way; its outputs come with the next step."""
        before, self._dispatched = self._dispatched, None
        if before is not None:
            self._ended += self._read(before).values()

    def replace_weights(self, leaves: List[Array], *, restart: bool) -> None:
        """Other arrays for the model, from the next step on. The prefix cache of the old ones is dropped.

        Args:
          leaves: in the order of `jax.tree.leaves(model)`, in the same shapes and dtypes.
          restart: begin unfinished requests anew; else they go on, over what the old weights have computed so far.
        """
        self.drain()
        self.runner.replace_weights(leaves)
        self.weights_version += 1
        if restart:
            self.scheduler.preempt_all()
        self.scheduler.cache.clear()
        for request in self._requests.values():
            begun = request.metrics.first_scheduled_time is not None
            if restart and begun:
                self._answers.begin_anew(request)
                request.restarts += 1
            if restart or not begun:
                request.weights = []
                request.root = root_name(request.salt, self.weights_version)
                for sequence in request.samples:
                    sequence.names = []
            request.weights.append(self.weights_version)

    def sleep(self) -> None:
        """Give the pages' memory back; what was in them is computed again after `wake_up`."""
        if not self.asleep:
            self.drain()
            self.scheduler.preempt_all()
            self.runner.free_pages()
            self.asleep = True

    def wake_up(self) -> None:
        """Take memory for pages again."""
        if self.asleep:
            self.runner.make_pages()
            self.asleep = False

    def check(self) -> None:
        """Raise AssertionError unless queue, rows and pages agree with each other and with the requests that are unfinished."""
        self.scheduler.check()
        there = {id(s) for r in self._requests.values() for s in r.samples if s.finish_reason is None}
        assert there == {id(s) for s in self.scheduler.sequences()}, "scheduler and engine know different sequences"
        if not there:
            assert self.scheduler.cache.pool.held == 0, "pages are held and nobody is there"
