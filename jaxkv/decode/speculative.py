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

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import integer, shown
from jaxkv.decode.run_state import Job, Plan
from jaxkv.decode.speculation import Speculation
from jaxkv.model.decoder import Decoder, check_decoder


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
        for name in ("num_tokens", "max_ngram"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))


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
        object.__setattr__(self, "num_tokens", integer("num_tokens", self.num_tokens))


def speculate(speculative: NGram | Draft, model: Decoder, longest: int, job: Job, plan: Plan) -> tuple[Job, Plan]:
    """Job and plan with guessing.

    Raises:
      ValueError: it is neither of the two; the draft model has another vocabulary, or allows fewer than `longest` tokens.
    """
    if not isinstance(speculative, NGram | Draft):
        raise ValueError(f"speculative must be a jaxkv.NGram or a jaxkv.Draft, got {shown(speculative)}")
    if isinstance(speculative, NGram):
        return job, dataclasses.replace(plan, speculation=Speculation(speculative.num_tokens, speculative.max_ngram))
    check_decoder(speculative.model, "speculative.model")
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
