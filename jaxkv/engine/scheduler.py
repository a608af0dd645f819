"""The scheduler on the host: which sequences take part in the next step, with which tokens, and on which pages.

    waiting (by priority, then arrival)         rows                                    a step
    [ 7, 9, 12 ]  ---admit: a row is free, -->  [ 3 | 8 | 4 | - ]  -------------------> a token of each row that decodes, and
       ^             and pages for all its tokens      |                                  pieces of prompts as far as the chunk takes them
       '-----------preempt: no page left, the youngest '
                   goes back and is computed again

A sequence's pages for all tokens that it has are taken when it is admitted, one more whenever its next token begins a page. Where none is
left the youngest sequence loses its pages; so the oldest is never preempted, and ends in the end: `check_fits` has refused before what
cannot fit alone. A preempted sequence keeps its place in the order, so that it is the first to come back.

A waiting sequence whose next page another one is just computing waits for it, so that equal prompts that come together are computed once.
Those behind it may go first.

Host only: no jax, and no arrays but lists.
"""

import bisect
from collections.abc import Iterator

from jaxkv.engine.batch import Batch, Limits, Piece
from jaxkv.engine.prefix_cache import PrefixCache, page_names
from jaxkv.engine.sequence import Request, Sequence


class Scheduler:
    """Owner of the queue, the rows and, through the prefix cache, the pages.

    Args:
      num_pages: pages of the pool, the null page included.
      limits: sizes.

    Attributes:
      cache: the prefix cache and its pool.
      waiting: sequences without a row, in the order in which they are served.
      running: sequences in rows, the ones admitted first standing first.
      preemptions, prefilled, steps: counters.
    """

    def __init__(self, num_pages: int, limits: Limits):
        self.limits = limits
        self.cache = PrefixCache(num_pages)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = self.prefilled = self.steps = 0
        self._free_rows = list(range(limits.rows - 1, -1, -1))
        self._waited = 0  # rows times steps that prompts in rows were passed over

    def pages_for(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.limits.page_size)

    def check_fits(self, prompt_length: int, limit: int) -> None:
        """Raise ValueError where a sequence of so many tokens could never be computed, even alone."""
        need, there = self.pages_for(prompt_length + limit - 1), self.cache.pool.capacity  # the last token is not computed
        if need > there:
            raise ValueError(
                f"a prompt of {prompt_length} tokens and {limit} new ones need {need} pages of {self.limits.page_size} tokens, and the "
                f"pool has {there}: ask for fewer max_tokens, or give the engine more memory (num_gpu_blocks_override, "
                "gpu_memory_utilization)"
            )

    def add(self, request: Request) -> None:
        """A request's samples wait from now on."""
        for sequence in request.samples:
            self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """A sequence waits at its place in the order."""
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Batch | None:
        """The next step; None where there is nothing to do before the results of earlier ones are known."""
        self._grow()
        self._admit()
        decode = [s for s in self.running if s.missing == 1 and s.remaining > 0]
        chosen = self._pieces(decode)
        if not decode and not chosen:
            return None
        drawing = list(decode)
        for sequence in decode:
            sequence.computed += 1
        for piece in chosen:
            piece.sequence.computed = piece.end
            self.prefilled += piece.end - piece.begin
            piece.sequence.request.metrics.prefilled_tokens += piece.end - piece.begin
            if piece.end == piece.sequence.length:
                drawing.append(piece.sequence)
        for sequence in drawing:
            sequence.in_flight += 1
        for piece in chosen:
            self._commit(piece.sequence)
        prefilling = list(dict.fromkeys(piece.sequence for piece in chosen))
        batch = Batch([*decode, *prefilling], decode, chosen, drawing, self.steps)
        self.steps += 1
        return batch

    def _grow(self) -> None:
        """A page for each sequence whose next token begins one; the youngest are preempted for it."""
        size = self.limits.page_size
        short = [s for s in self.running if len(s.pages) * size < s.length and s.remaining > 0]
        for sequence in sorted(short, key=lambda s: s.order):
            while sequence.row is not None and (more := self.cache.pool.take(1)) is None:
                self.preempt(max(self.running, key=lambda s: s.order))
            if sequence.row is not None:
                sequence.pages += more

    def _admit(self) -> None:
        """Sequences that wait take free rows, in order, as long as there are pages for all their tokens."""
        passed = []
        while self.waiting and self._free_rows:
            sequence = self.waiting.pop(0)
            verdict = "later" if sequence.in_flight else self._take_pages(sequence)
            if verdict == "admitted":
                sequence.row = self._free_rows.pop()
                self.running.append(sequence)
                continue
            passed.append(sequence)
            if verdict == "full":
                break
            if len(passed) > 4 * self.limits.rows:  # so that a step's work does not grow with the queue
                break
        for sequence in reversed(passed):
            self.wait(sequence)

    def _take_pages(self, sequence: Sequence) -> str:
        """Pages for all tokens of a sequence that waits, those of its longest known prefix shared: "admitted", "later" where another
        sequence is computing what it needs, or "full"."""
        request, size, cache = sequence.request, self.limits.page_size, self.cache
        if request.whole_prompt and sequence.index > 0:
            return "later"  # the first sample computes the prompt's log-probabilities, and then its pages are there
        found: list[int] = []
        usable = self._names(sequence)[: (sequence.known - 1) // size]  # the last token's logits are needed, so it is computed
        if not request.whole_prompt:
            found = cache.find(usable)
            if len(found) < len(usable) and cache.announced(usable[len(found)]):
                return "later"
        need = self.pages_for(sequence.known) - len(found)
        if need + cache.pool.idle(found) > cache.pool.available:
            return "full"
        cache.pool.share(found)
        more = cache.pool.take(need)
        assert more is not None
        sequence.pages, sequence.committed = [*found, *more], len(found)
        sequence.computed = len(found) * size
        if self._shares(request):
            cache.queries += sequence.known
            cache.hits += sequence.computed
            cache.announce(usable[len(found) :], sequence)
        if request.cached is None:
            request.cached = min(sequence.computed, sequence.prompt_length)
        return "admitted"

    def _shares(self, request: Request) -> bool:
        """Whether a request's pages can be shared: with all others, or at least among its own samples."""
        return (self.limits.prefix_caching or request.params.n > 1) and not request.mixed_weights

    def _names(self, sequence: Sequence) -> list[bytes]:
        """The names of a sequence's whole pages of known tokens; none where nothing is shared."""
        if not self._shares(sequence.request):
            return []
        if len(sequence.names) < sequence.known // self.limits.page_size:
            tokens = sequence.tokens(0, sequence.known)
            sequence.names = page_names(tokens, self.limits.page_size, sequence.request.root, sequence.names)
        return sequence.names

    def _pieces(self, decode: list[Sequence]) -> list[Piece]:
        """Pieces of prompts for the next step, the oldest sequence's first, as many as the chunk takes; none where it pays to wait."""
        limits, pieces = self.limits, []
        to_prefill = sorted((s for s in self.running if s.missing > 1), key=lambda s: s.order)
        if not to_prefill:
            return []
        wanted = sum(-(-s.missing // limits.width) for s in to_prefill)
        empty = max(limits.pieces - wanted, 0) * limits.width if limits.padding_costs else 0
        idle_cost = 2 + 32 // limits.rows  # of the device scheduler: docs/measurements.md, "Cost of a waiting row"
        if decode and idle_cost * self._waited < empty:
            self._waited += len(to_prefill)
            return []
        self._waited = 0
        for sequence in to_prefill:
            begin = sequence.computed
            while begin < sequence.length and len(pieces) < limits.pieces:
                end = min(begin + limits.width, sequence.length)
                pieces.append(Piece(sequence, begin, end))
                begin = end
        return pieces

    def _commit(self, sequence: Sequence) -> None:
        """Tell the prefix cache of the pages that are full of known tokens, and computed by steps that come before all later ones."""
        if not self._shares(sequence.request):
            return
        full = min(sequence.computed, sequence.known) // self.limits.page_size
        if full <= sequence.committed:
            return
        names = self._names(sequence)
        for page in range(sequence.committed, full):
            self.cache.commit(names[page], sequence.pages[page])
        sequence.committed = full

    def preempt(self, sequence: Sequence) -> None:
        """A sequence gives its row and pages back, and waits at its place in the order to be computed again."""
        self.preemptions += 1
        sequence.request.metrics.preemptions += 1
        self._leave(sequence)
        self.wait(sequence)

    def read(self, sequence: Sequence, token: int) -> None:
        """The value of a sequence's oldest token in flight is known."""
        sequence.in_flight -= 1
        sequence.output.append(token)
        if sequence.row is not None:
            self._commit(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was: its row and pages are free. A step in flight may still write to them, before any other."""
        if sequence.row is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._free_rows.append(sequence.row)
        self.running.remove(sequence)
        self.cache.withdraw(sequence.names[sequence.committed :], sequence)
        pool = self.cache.pool
        pool.release(reversed(sequence.pages))  # a prefix is worth more than what follows it
        sequence.leave_row()

    def preempt_all(self) -> None:
        """Nobody is in a row any more, and nothing that pages hold is known."""
        for sequence in list(self.running):
            self.preempt(sequence)
        self.cache.clear()

    def sequences(self) -> Iterator[Sequence]:
        """All that wait or run."""
        yield from self.waiting
        yield from self.running

    def check(self) -> None:
        """Raise AssertionError unless rows, pages and queues agree."""
        rows = [s.row for s in self.running if s.row is not None]
        assert sorted([*rows, *self._free_rows]) == list(range(self.limits.rows)), "a row is in two places, or in none"
        assert all(s.row is None and not s.pages and not s.computed for s in self.waiting), (
            "a sequence that waits holds something"
        )
        assert self.waiting == sorted(self.waiting, key=lambda s: s.order), "the queue is out of order"
        assert all(self.pages_for(s.computed) <= len(s.pages) <= self.pages_for(s.length) for s in self.running)
        self.cache.check((s.pages for s in self.running), self.running)
