"""Speculative decoding inside `generate`: cheap guesses, which the model checks several at a time.

    known tokens   p p p p p t              t, the last one, is not in the cache yet
    guesses                    a b c        what followed the same words earlier in the text, or a draft model's opinion
    one step       t a b c  -> A B C D      the model's own choices for the places after t, a, b and c
    kept                       A B          if a = A and b != B: a choice counts as long as all guesses before it were right

A choice is made as `generate` makes it without guesses: the best token, or the sample drawn with the key of its request and
position. So tokens, log-probabilities and ends do not depend on the guesses, only the number of steps does: sampling follows the
model's distribution because it is the very same sampling. (The usual rejection sampling keeps the distribution, but not the tokens.)
With `deterministic=True` that holds to the bit; without it products over more tokens round differently, and a near tie may tip.

A draft model draws its guess with the same key, hence with the same Gumbel noise, as the model its choice: two distributions at a
total variation distance d then agree with a probability of at least (1 - d) / (1 + d), against 1 - d for the best possible coupling.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Saxena, "Prompt Lookup Decoding" (2023);
Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding" (2024).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.cache.pages import Pages
from jaxkv.decode.device_scheduler import choose, count_step, make_room, next_inputs, note
from jaxkv.decode.run_state import Chunk, Job, Plan, Run
from jaxkv.decode.step import StepInputs
from jaxkv.model.attend import Paged, Segment
from jaxkv.model.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class NGram:
    """Guess what followed the last tokens when they last stood in the text, prompt included ("prompt lookup").

    Good where answers repeat their prompt: summaries, edits, code. Costs no second model.

    Args:
      num_tokens: guesses per step, >= 1.
      max_ngram: the longest piece of text looked for, in tokens, >= 1; shorter ones count if it is not found.

    Raises:
      ValueError: a value is out of range.

    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    num_tokens: int = 4
    max_ngram: int = 3

    def __post_init__(self):
        _check_positive("num_tokens", self.num_tokens)
        _check_positive("max_ngram", self.max_ngram)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Guess by a second, smaller model with the same vocabulary.

    Its keys and values stand in pages of their own shape under the same block tables, so that whatever happens to a row happens
    to both.

    Args:
      model: the guesser.
      num_tokens: guesses per step, >= 1.

    Raises:
      ValueError: a value is out of range.

    Source: Leviathan et al. 2023 (arXiv:2211.17192).
    """

    model: Decoder
    num_tokens: int = dataclasses.field(default=4, metadata={"static": True})

    def __post_init__(self):
        _check_positive("num_tokens", self.num_tokens)


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def speculate(speculative: NGram | Draft, model: Decoder, longest: int, job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Job and plan with guessing.

    Raises:
      ValueError: it is neither of the two; the draft model has another vocabulary, or allows fewer than `longest` tokens.
    """
    if not isinstance(speculative, NGram | Draft):
        raise ValueError(f"speculative must be a jaxkv.NGram or a jaxkv.Draft, got {speculative!r}")
    if isinstance(speculative, NGram):
        return job, dataclasses.replace(plan, speculation=Speculation(speculative.num_tokens, speculative.max_ngram))
    ours, theirs = model.config, speculative.model.config
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(f"the draft model has a vocabulary of {theirs.vocab_size} tokens, the model one of {ours.vocab_size}")
    if theirs.max_seq_len < longest:
        raise ValueError(f"the draft model allows {theirs.max_seq_len} tokens, but sequences may have {longest}")
    plan = dataclasses.replace(plan, speculation=Speculation(speculative.num_tokens, None))
    return dataclasses.replace(job, draft=speculative.model), plan


def with_draft_pages(cache: PagedKVCache, draft: PagedKVCache) -> PagedKVCache:
    """The cache with the draft model's layers behind its own: copies on write then include them."""
    return cache.with_pages(cache.pages + draft.pages)


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The step that takes the place of `jaxkv.decode.device_scheduler.run_step`; static under jit.

    Args:
      num_tokens: guesses per row.
      max_ngram: see `NGram`; None for a draft model.
    """

    num_tokens: int
    max_ngram: int | None

    def run_step(self, model: Decoder, job: Job, run: Run, plan: Plan, chunk: Chunk) -> Run:
        """One step of the model, and the one or more tokens it gives to each row."""
        run = make_room(job, run, plan, chunk)
        inputs = next_inputs(job, run, plan, chunk)
        known = run.known(job, plan, run.row_request)
        request = jnp.where(run.live, run.row_request, 0)
        room = job.limits[request // plan.num_samples] - run.out_lengths[request] - 1
        count = jnp.where(inputs.decode_count > 0, jnp.clip(room, 0, self.num_tokens), 0)
        guesses = jnp.zeros((known.shape[0], self.num_tokens), jnp.int32)
        if self.max_ngram is not None:
            guesses, found = self._look_up(job, run, plan, known)
            count = jnp.where(found, count, 0)
        # Guesses take free pages only: when there are too few, this step goes without, and nobody is preempted for them.
        wanted = inputs.num_tokens() + count
        count = jnp.where(jnp.sum(run.cache.pages_needed(wanted)) > run.cache.num_free, 0, count)

        num_tokens = inputs.num_tokens() + count
        cache = run.cache.allocate(num_tokens, max_tokens=max(chunk.tokens, 1 + self.num_tokens))
        if job.draft is not None:
            cache, guesses = self._draft(len(model.layers), job, run, plan, cache, inputs, count)
        cache = cache.advance(num_tokens)
        logits, cache = self._check(model, plan, cache, inputs, guesses, count)
        produced = (num_tokens > 0) & (cache.lengths - count == known)
        return self._keep(job, count_step(run, cache), plan, logits, known, produced, guesses, count)

    def _look_up(
        self, job: Job, run: Run, plan: Plan, known: Int[Array, " seqs"]
    ) -> tuple[Int[Array, "seqs num_tokens"], Bool[Array, " seqs"]]:
        """What followed the latest occurrence of the longest piece of text that is a row's end, repeated if it is short."""
        assert self.max_ngram is not None
        width = job.prompts.shape[1] + run.tokens.shape[1]
        shape = (known.shape[0], width)
        place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], shape)
        text = run.token_at(job, plan, jnp.broadcast_to(run.row_request[:, None], shape), place)
        last = (known - 1)[:, None]
        same, matched = jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32)
        for i in range(self.max_ngram):
            token = jnp.take_along_axis(text, jnp.maximum(last - i, 0), axis=1)
            same &= (jnp.roll(text, i, axis=1) == token) & (place >= i)
            matched += same.astype(jnp.int32)
        ranked = jnp.where((place < last) & (matched > 0), matched * width + place, -1)
        best = jnp.argmax(ranked, axis=1).astype(jnp.int32)[:, None]
        nth = jnp.arange(self.num_tokens, dtype=jnp.int32)[None, :] % jnp.maximum(last - best, 1)
        return jnp.take_along_axis(text, jnp.minimum(best + 1 + nth, width - 1), axis=1), jnp.max(ranked, axis=1) >= 0

    def _draft(
        self, own_layers: int, job: Job, run: Run, plan: Plan, cache: PagedKVCache, inputs: StepInputs, count: Array
    ) -> tuple[PagedKVCache, Int[Array, "seqs num_tokens"]]:
        """The draft model through the chunk, through each row's next token, and through its own guesses, one by one.

        The last guess too is run, for its key and value: the model may find it right.
        """
        draft = job.draft
        assert draft is not None
        request = jnp.where(run.live, run.row_request, 0)
        options = {"implementation": plan.implementation, "deterministic": plan.deterministic}

        def forward(tokens: Array, segment: Segment, pages: tuple[Pages, ...]) -> tuple[Array, tuple[Pages, ...]]:
            attend = Paged.over((segment,), cache.page_size, **options)
            hidden, written = draft.forward(tokens, attend.positions(), attend, pages, deterministic=plan.deterministic)
            assert written is not None
            return hidden, written

        def guess(state: tuple[Array, tuple[Pages, ...]], nth: Array) -> tuple[tuple[Array, tuple[Pages, ...]], Array]:
            token, pages = state
            active = ((inputs.decode_count > 0) & (nth <= count)).astype(jnp.int32)
            segment = Segment(cache.block_tables, cache.lengths + active * (nth + 1), active, 1)
            hidden, pages = forward(token, segment, pages)
            logits = draft.logits(hidden, deterministic=plan.deterministic)
            token = choose(job, plan, logits, request, cache.lengths + 1 + nth).token
            return (token, pages), token

        own, pages = cache.pages[:own_layers], cache.pages[own_layers:]
        if inputs.chunk_rows.shape[0]:
            chunk = inputs.chunk_segment(cache.advance(inputs.chunk_num_tokens()))
            _, pages = forward(inputs.chunk_tokens.reshape(-1), chunk, pages)
        steps = jnp.arange(self.num_tokens + 1, dtype=jnp.int32)
        (_, pages), guesses = lax.scan(guess, (inputs.decode_tokens, pages), steps)
        return cache.with_pages(own + pages), guesses[:-1].T

    def _check(
        self, model: Decoder, plan: Plan, cache: PagedKVCache, inputs: StepInputs, guesses: Array, count: Array
    ) -> tuple[Array, PagedKVCache]:
        """The model over each row's next token and guesses, and the chunk: logits [seqs, 1 + num_tokens, vocab].

        A row whose chunk this was has its logits in the first place.
        """
        seqs, queries = guesses.shape[0], 1 + self.num_tokens
        tokens = jnp.concatenate([inputs.decode_tokens[:, None], guesses], axis=1).reshape(-1)
        segments = [Segment(cache.block_tables, cache.lengths, inputs.decode_count + count, queries)]
        if inputs.chunk_rows.shape[0]:
            tokens = jnp.concatenate([tokens, inputs.chunk_tokens.reshape(-1)])
            segments.append(inputs.chunk_segment(cache))
        options = {"implementation": plan.implementation, "deterministic": plan.deterministic}
        attend = Paged.over(tuple(segments), cache.page_size, **options)
        own, rest = cache.pages[: len(model.layers)], cache.pages[len(model.layers) :]
        hidden, pages = model.forward(tokens, attend.positions(), attend, own, deterministic=plan.deterministic)
        assert pages is not None
        last = hidden[: seqs * queries]
        if inputs.chunk_rows.shape[0]:
            last = inputs.with_chunk_ends(last, hidden[seqs * queries :], stride=queries)
        logits = model.logits(last, deterministic=plan.deterministic)
        return logits.reshape(seqs, queries, -1), cache.with_pages(pages + rest)

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
        kept = jnp.concatenate([jnp.ones((seqs, 1), bool), jnp.cumprod(right.astype(jnp.int32), axis=1) > 0], axis=1)
        kept &= produced[:, None]
        index = run.out_lengths[request] + flat(nth)
        lengths = run.cache.lengths - jnp.where(produced, count + 1 - jnp.sum(kept, axis=1, dtype=jnp.int32), 0)
        run = dataclasses.replace(run, cache=run.cache.truncate(lengths))
        return note(run, plan, chosen, request, position, kept.reshape(-1), index)
