"""The step of speculative decoding: guesses behind each row's next token, checked by the model in the same pass.

See `jaxkv.decode.speculative` for the picture, and for what users ask for.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache, when
from jaxkv.cache.pages import Pages
from jaxkv.decode.admission import make_room
from jaxkv.decode.choice import choose, note
from jaxkv.decode.device_scheduler import count_step, next_inputs
from jaxkv.decode.run_state import Job, Plan, Run
from jaxkv.decode.step import StepInputs, step_logits
from jaxkv.model.decoder import Decoder
from jaxkv.model.segments import Segment


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The step that takes the place of `jaxkv.decode.device_scheduler.run_step`; static under jit.

    Args:
      num_tokens: guesses per row.
      max_ngram: see `NGram`; None for a draft model.
    """

    num_tokens: int
    max_ngram: int | None

    def run_step(self, model: Decoder, job: Job, run: Run, pays: Array, plan: Plan) -> Run:
        """One step of the model, with a chunk where `pays` holds, and the one or more tokens it gives to each row."""
        run, inputs = make_room(run, lambda r: next_inputs(job, r, plan.chunk, pays), shared=job.shares_pages)
        with_chunk = lambda r: self._step(model, job, r, plan, inputs.beside_chunk())
        without = lambda r: self._step(model, job, r, plan, inputs.without_chunk())
        return when(~pays, without, when(pays, with_chunk, run))

    def _step(self, model: Decoder, job: Job, run: Run, plan: Plan, inputs: StepInputs) -> Run:
        known = run.known(job, run.row_request)
        request = jnp.where(run.live, run.row_request, 0)
        room = job.limits[job.prompt_of(request)] - run.out_lengths[request] - 1
        count = jnp.where(inputs.decode_count > 0, jnp.clip(room, 0, self.num_tokens), 0)
        guesses = jnp.zeros((known.shape[0], self.num_tokens), jnp.int32)
        if self.max_ngram is not None:
            guesses, found = self._look_up(job, run, known)
            count = jnp.where(found, count, 0)
        # Guesses take free pages only: when there are too few, this step goes without, and no row is preempted for them.
        wanted = inputs.num_tokens() + count
        count = jnp.where(jnp.sum(run.cache.pages_needed(wanted), dtype=jnp.int32) > run.cache.num_free, 0, count)

        num_tokens = inputs.num_tokens() + count
        most = max(inputs.chunk_tokens.size, 1 + self.num_tokens)
        cache = run.cache.reserve(num_tokens, max_tokens=most, shared=job.shares_pages)
        if job.draft is not None:
            drafted = dataclasses.replace(run, cache=cache)
            cache, guesses = self._draft(len(model.layers), job, drafted, plan, inputs, count)
        cache = cache.advance(num_tokens)
        logits, cache = self._check(model, plan, cache, _with_guesses(inputs, guesses, count))
        produced = (num_tokens > 0) & (cache.lengths - count == known)
        return self._keep(job, count_step(run, cache), plan, logits, known, produced, guesses, count)

    def _look_up(
        self, job: Job, run: Run, known: Int[Array, " seqs"]
    ) -> tuple[Int[Array, "seqs num_tokens"], Bool[Array, " seqs"]]:
        """What followed the latest occurrence of the longest piece of text that is a row's end, repeated if it is short."""
        assert self.max_ngram is not None
        width = job.prompts.shape[1] + run.tokens.shape[1]
        shape = (known.shape[0], width)
        place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], shape)
        text = run.token_at(job, jnp.broadcast_to(run.row_request[:, None], shape), place)
        last = (known - 1)[:, None]
        same, matched = jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32)
        for i in range(self.max_ngram):
            token = jnp.take_along_axis(text, jnp.maximum(last - i, 0), axis=1)
            same &= (jnp.roll(text, i, axis=1) == token) & (place >= i)
            matched += same.astype(jnp.int32)
        ranked = jnp.where((place < last) & (matched > 0), matched * width + place, -1)
        best = lax.argmax(ranked, 1, jnp.int32)[:, None]
        nth = jnp.arange(self.num_tokens, dtype=jnp.int32)[None, :] % jnp.maximum(last - best, 1)
        return jnp.take_along_axis(text, jnp.minimum(best + 1 + nth, width - 1), axis=1), jnp.max(ranked, axis=1) >= 0

    def _draft(
        self, own_layers: int, job: Job, run: Run, plan: Plan, inputs: StepInputs, count: Array
    ) -> tuple[PagedKVCache, Int[Array, "seqs num_tokens"]]:
        """The draft model through the chunk, through each row's next token, and through its own guesses, one by one.

        The last guess too is run, for its key and value: the model may find it right.
        """
        draft, cache, numerics = job.draft, run.cache, plan.numerics
        assert draft is not None
        request = jnp.where(run.live, run.row_request, 0)

        def guess(state: tuple[Array, tuple[Pages, ...]], nth: Array) -> tuple[tuple[Array, tuple[Pages, ...]], Array]:
            token, pages = state
            active = ((inputs.decode_count > 0) & (nth <= count)).astype(jnp.int32)
            segment = Segment(None, cache.lengths + active * (nth + 1), active, 1)
            hidden, pages = draft.forward_paged(token, (segment,), cache.tables, pages, numerics)
            token = choose(job, plan, draft.logits(hidden, numerics), request, cache.lengths + 1 + nth).token
            return (token, pages), token

        own, pages = cache.pages[:own_layers], cache.pages[own_layers:]
        if inputs.chunk_rows.shape[0]:
            chunk = inputs.chunk_segment(cache.lengths + inputs.chunk_num_tokens())
            _, pages = draft.forward_paged(inputs.chunk_tokens.reshape(-1), (chunk,), cache.tables, pages, numerics)
        if inputs.decode_tokens.shape[0] == 0:
            return cache.with_pages(own + pages), jnp.zeros((cache.max_seqs, self.num_tokens), jnp.int32)
        steps = jnp.arange(self.num_tokens + 1, dtype=jnp.int32)
        (_, pages), guesses = lax.scan(guess, (inputs.decode_tokens, pages), steps)
        return cache.with_pages(own + pages), guesses[:-1].T

    def _check(self, model: Decoder, plan: Plan, cache: PagedKVCache, inputs: StepInputs) -> tuple[Array, PagedKVCache]:
        """The model over each row's next token and guesses, and the chunk: logits [seqs, 1 + num_tokens, vocab].

        A row whose chunk this was has its logits in the first place.
        """
        own, rest = cache.pages[: len(model.layers)], cache.pages[len(model.layers) :]
        logits, pages = step_logits(model, inputs, cache.tables, own, plan.numerics)
        return logits.reshape(cache.max_seqs, inputs.queries, -1), cache.with_pages(pages + rest)

    def _keep(
        self, job: Job, run: Run, plan: Plan, logits: Array, known: Array, produced: Array, guesses: Array, count: Array
    ) -> Run:
        """Note the choices up to the first one that its guess missed or that ends the sequence; forget the wrong guesses."""
        seqs, queries = logits.shape[:2]
        nth = jnp.arange(queries, dtype=jnp.int32)[None, :]

        def flat(x: Array) -> Array:
            return jnp.broadcast_to(x, (seqs, queries)).reshape(-1)

        request = flat(jnp.where(run.live, run.row_request, 0)[:, None])
        position = (known[:, None] + nth).reshape(-1)
        chosen = choose(job, plan, logits.reshape(seqs * queries, -1), request, position)
        token, ends = chosen.token.reshape(seqs, queries), chosen.ends.reshape(seqs, queries)
        right = (token[:, :-1] == guesses) & (nth[:, :-1] < count[:, None]) & ~ends[:, :-1]
        kept = jnp.concatenate([jnp.ones((seqs, 1), bool), jnp.cumprod(right, axis=1, dtype=jnp.int32) > 0], axis=1)
        kept &= produced[:, None]
        index = run.out_lengths[request] + flat(nth)
        lengths = run.cache.lengths - jnp.where(produced, count + 1 - jnp.sum(kept, axis=1, dtype=jnp.int32), 0)
        run = dataclasses.replace(run, cache=run.cache.truncate(lengths))
        return note(run, plan, chosen, kept.reshape(-1), index)


def _with_guesses(inputs: StepInputs, guesses: Int[Array, "seqs num_tokens"], count: Array) -> StepInputs:
    """The step's inputs with each decoding row's guesses behind its next token."""
    decoding = inputs.decode_tokens.shape[0]  # none, or all rows
    tokens = jnp.concatenate([inputs.decode_tokens[:, None], guesses[:decoding]], axis=1)
    return dataclasses.replace(inputs, decode_tokens=tokens, decode_count=inputs.decode_count + count)
