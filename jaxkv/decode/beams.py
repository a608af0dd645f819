"""Which sequences a beam search keeps: scores, candidates, finished sequences. Plain arrays; knows neither model nor cache.

The arithmetic is that of transformers 5 (`GenerationMixin._beam_search`), per prompt: there, too, prompts do not influence one
another's result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

DEAD = np.float32(-1e9)
"""Score of what must not be chosen. Added, not assigned, as transformers does: among the dead the better ones come first."""


class Rules(NamedTuple):
    """How sequences are scored and when to stop: the last fields of `Beams`."""

    penalty: Float[Array, ""]
    eager: Bool[Array, ""]
    patient: Bool[Array, ""]
    limit: Int[Array, ""]


class Beams(NamedTuple):
    """State of a beam search.

    Attributes:
      tokens, scores: of the beams that go on, best first; scores are sums of log-probabilities.
      done_tokens, done_lengths, done_scores: of finished sequences, best first; length 0 is an empty place.
      improvable: whether a beam could still beat a finished sequence.
      count: tokens generated per beam.
      penalty: finished sequences are scored by the sum over (generated tokens) ** penalty.
      eager: a prompt is over as soon as it has as many finished sequences as beams.
      patient: it is not over while a beam could improve by growing up to the limit.
      limit: tokens to generate, at most max_new.
    """

    tokens: Int[Array, "num_prompts num_beams max_new"]
    scores: Float[Array, "num_prompts num_beams"]
    done_tokens: Int[Array, "num_prompts num_beams max_new"]
    done_lengths: Int[Array, "num_prompts num_beams"]
    done_scores: Float[Array, "num_prompts num_beams"]
    improvable: Bool[Array, " num_prompts"]
    count: Int[Array, ""]
    penalty: Float[Array, ""]
    eager: Bool[Array, ""]
    patient: Bool[Array, ""]
    limit: Int[Array, ""]

    @classmethod
    def start(cls, real: Bool[Array, " num_prompts"], num_beams: int, max_new: int, rules: "Rules") -> "Beams":
        """Nothing generated. Only the first beam counts: the others are the same, and would be chosen again and again. Prompts that
        are not real are over."""
        num_prompts = real.shape[0]
        shape = (num_prompts, num_beams)
        dead = jnp.full(shape, DEAD, jnp.float32)
        scores = dead.at[:, 0].set(0.0)
        tokens, none = jnp.full((*shape, max_new), -1, jnp.int32), jnp.zeros((), jnp.int32)
        return cls(tokens, scores, tokens, jnp.zeros(shape, jnp.int32), dead, real, none, *rules)

    def full(self) -> Bool[Array, " num_prompts"]:
        """As many finished sequences as beams."""
        return jnp.all(self.done_lengths > 0, axis=1)

    def over(self) -> Bool[Array, " num_prompts"]:
        """Nothing that follows can change the result."""
        return ~self.improvable | (self.count >= self.limit) | (self.full() & self.eager)


def candidates(num_beams: int, num_ends: int) -> int:
    """Continuations looked at per prompt: were the best of every beam an end token, `num_beams` others would be left."""
    return max(2, 1 + num_ends) * num_beams


def select(
    beams: Beams, logits: Float[Array, "num_prompts num_beams vocab"], eos: Int[Array, " ends"]
) -> tuple[Beams, Int[Array, "num_prompts num_beams"]]:
    """One more token for every beam: the best continuations go on, those that end are finished.

    Args:
      beams: the state; its `count` is below max_new.
      logits: float32, of each beam's next token.
      eos: ids that end a sequence.

    Returns:
      The new state, and for each beam of it the beam that it continues.
    """
    num_prompts, num_beams, vocab = logits.shape
    total = (beams.scores[:, :, None] + jax.nn.log_softmax(logits, axis=-1)).reshape(num_prompts, -1)
    best, index = lax.top_k(total, candidates(num_beams, eos.shape[0]))
    parent, token = index // vocab, index % vocab
    tokens = _take(beams.tokens, parent).at[:, :, beams.count].set(token)
    count = beams.count + 1
    ends = jnp.any(token[:, :, None] == eos[None, None, :], axis=-1) | (count >= beams.limit)
    frozen = beams.over()
    beams = _finish(beams._replace(count=count), tokens, best, ends & ~frozen[:, None])
    scores, order = lax.top_k(best + jnp.where(ends, DEAD, 0.0), num_beams)
    beams = beams._replace(tokens=_take(tokens, order), scores=scores)
    beams = beams._replace(improvable=beams.improvable & _can_improve(beams))
    return beams, _take(parent, order)


def _finish(beams: Beams, tokens: Array, sums: Array, ends: Array) -> Beams:
    """Sequences that end now, among the `num_beams` best continuations, compete with those finished before."""
    num_beams = beams.scores.shape[1]
    ends = ends & (jnp.arange(ends.shape[1], dtype=jnp.int32) < num_beams)[None, :]
    scores = sums / beams.count.astype(jnp.float32) ** beams.penalty + jnp.where(ends, 0.0, DEAD)
    lengths = jnp.where(ends, beams.count, 0)
    scores, order = lax.top_k(jnp.concatenate([beams.done_scores, scores], axis=1), num_beams)
    return beams._replace(
        done_tokens=_take(jnp.concatenate([beams.done_tokens, tokens], axis=1), order),
        done_lengths=_take(jnp.concatenate([beams.done_lengths, lengths], axis=1), order),
        done_scores=scores,
    )


def _can_improve(beams: Beams) -> Bool[Array, " num_prompts"]:
    """The best beam could still beat the worst finished sequence, or there are fewer of these than beams."""
    longest = jnp.where(beams.patient & (beams.penalty > 0), beams.limit, beams.count)
    length = longest.astype(jnp.float32)
    reachable = beams.scores[:, 0] / length**beams.penalty
    return reachable > jnp.where(beams.full(), jnp.min(beams.done_scores, axis=1), DEAD)


def _take(x: Array, index: Int[Array, "num_prompts n"]) -> Array:
    """Entries of the second axis, per prompt."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)
