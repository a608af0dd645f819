"""What `generate`, `stream` and `beam_search` give back."""

from typing import NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int


def readable(*values: object) -> bool:
    """Whether all are arrays whose numbers are known: not traced, and no placeholders of jax's."""
    return all(isinstance(x, Array | np.ndarray) and not isinstance(x, Tracer) for x in values)


class GenerateStats(NamedTuple):
    """How a run went: scalar arrays.

    Attributes:
      steps: passes through the model.
      preemptions: times a row was moved back to the waiting line because the pool was full.
      peak_pages: most pages in use at once.
      waste: share of the slots of used pages without a token, averaged over the steps, in [0, 1].
      nonfinite: tokens that were chosen from logits with NaN or infinity among them: an overflow (float16), or broken weights.
    """

    steps: Int[Array, ""]
    preemptions: Int[Array, ""]
    peak_pages: Int[Array, ""]
    waste: Float[Array, ""]
    nonfinite: Int[Array, ""]


class GenerateOutput(NamedTuple):
    """What `generate` returns.

    Attributes:
      tokens: generated ids, an end token included, padded with -1.
      lengths: how many are real.
      logprobs: of the chosen tokens under the model's own distribution (before temperature and filters), padded with 0.
      sampled_logprobs: the same under the distribution that was sampled from (after both); 0 for greedy prompts.
      finished: ended by an end token rather than by the number of tokens.
      stats: see `GenerateStats`.
    """

    tokens: Int[Array, "num_prompts num_samples max_new"]
    lengths: Int[Array, "num_prompts num_samples"]
    logprobs: Float[Array, "num_prompts num_samples max_new"]
    sampled_logprobs: Float[Array, "num_prompts num_samples max_new"]
    finished: Bool[Array, "num_prompts num_samples"]
    stats: GenerateStats

    def __repr__(self) -> str:
        """In words; shapes alone where values are traced or are no arrays."""
        try:
            prompts, samples, most = self.tokens.shape
        except (AttributeError, ValueError):
            return f"GenerateOutput({', '.join(self._fields)})"  # jax builds one of placeholders, or adds an axis
        head = f"GenerateOutput({prompts} prompts, {samples} samples of each, of up to {most} tokens"
        if not readable(self.lengths, self.finished, *self.stats):
            return f"{head})"
        made, ended = int(np.sum(np.asarray(self.lengths))), int(np.sum(np.asarray(self.finished)))
        steps, preempted, pages, waste = (
            np.asarray(x).item() for x in (self.stats.steps, self.stats.preemptions, self.stats.peak_pages, self.stats.waste)
        )
        return (
            f"{head}:\n  {made} tokens made, {ended} of {prompts * samples} finished by an end token,\n"
            f"  {steps} steps, {preempted} preemptions, {pages} pages at most, {waste:.0%} of their slots empty;\n"
            "  .tokens, .lengths, .logprobs, .sampled_logprobs, .finished, .stats)"
        )

    def _repr_html_(self) -> str:
        from jaxkv.viz.output_picture import output_svg  # only here: results that nobody looks at need no pictures

        figures = ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in self.stats._asdict().items())
        return output_svg(np.asarray(self.lengths), np.asarray(self.logprobs), np.asarray(self.finished), figures)


class BeamSearchOutput(NamedTuple):
    """What `beam_search` returns; the best sequence first.

    Attributes:
      tokens: generated ids, an end token included, padded with -1.
      lengths: how many are real.
      scores: sum of the tokens' log-probabilities over lengths ** length_penalty.
      steps: passes of all beams through the model, prefill not counted.
      peak_pages: most pages in use at once.
    """

    tokens: Int[Array, "num_prompts num_return max_new"]
    lengths: Int[Array, "num_prompts num_return"]
    scores: Float[Array, "num_prompts num_return"]
    steps: Int[Array, ""]
    peak_pages: Int[Array, ""]

    def __repr__(self) -> str:
        """In words; names alone where values are traced or are no arrays."""
        if not readable(*self) or self.tokens.ndim != 3:
            return f"BeamSearchOutput({', '.join(self._fields)})"
        prompts, sequences, most = self.tokens.shape
        made = int(np.sum(np.asarray(self.lengths)))
        return (
            f"BeamSearchOutput({prompts} prompts, {sequences} sequences of each, of up to {most} tokens: {made} tokens,\n"
            f"  {int(self.steps)} steps, {int(self.peak_pages)} pages at most; .{', .'.join(self._fields)})"
        )


class Token(NamedTuple):
    """One generated token, as `stream` yields it; position counts from the prompt's first token."""

    prompt: int
    sample: int
    position: int
    token: int
    logprob: float
