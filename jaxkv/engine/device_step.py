"""One step of an engine on the device: new tokens through the model, a token drawn for each row that has come to its end.

Tables and pages belong to the host; the device keeps the pages' contents and the last token of every row, which the next step takes from
there, so that nobody waits for the host to read it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.cache.pages import Pages
from jaxkv.cache.tables import Tables
from jaxkv.decode.prompts import token_keys
from jaxkv.decode.sampling import Sampling, log_normaliser, sample, token_logprobs
from jaxkv.decode.step import StepInputs
from jaxkv.engine.packing import Shape, packed
from jaxkv.model.decoder import Decoder
from jaxkv.ops.numerics import Numerics


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """What is static about a step.

    Attributes:
      shape: sizes.
      page_size: tokens of a page.
      numerics: how the model is computed.
      model: the structure of the decoder, whose arrays come as a flat list: that costs the host nothing at each step.
    """

    shape: Shape
    page_size: int
    numerics: Numerics
    model: Any

    def __call__(
        self, leaves: list[Array], pages: tuple[Pages, ...], last: Int[Array, " places"], words: Int[Array, " words"]
    ) -> tuple[Array, Array, Array, tuple[Pages, ...]]:
        """A step.

        Args:
          leaves: arrays of the decoder.
          pages: donated.
          last: the last token drawn for each row of the engine; donated.
          words: what `Shape.empty` lays out.

        Returns:
          `packed` of each row, i32[rows, words]; the same of each token of the pieces, or none; `last`; `pages`.
        """
        model: Decoder = jax.tree.unflatten(self.model, leaves)
        shape, given = self.shape, self.shape.unpack(words)
        drawn = last.at[given["places"]].get(mode="fill", fill_value=0)
        tokens = jnp.where(given["tokens"] < 0, drawn, given["tokens"])
        if shape.pieces:
            inputs = StepInputs(tokens, given["decodes"], given["piece_tokens"], given["piece_rows"], given["piece_counts"])
        else:
            inputs = StepInputs.decode(tokens, given["decodes"])
        tables = Tables(given["tables"], given["lengths"], self.page_size)
        hidden, pages = model.forward_paged(inputs.tokens(), inputs.segments(tables.lengths), tables, pages, self.numerics)
        draws = given["draws"] > 0
        logits = model.logits(inputs.last_of_each(hidden), self.numerics, draws)
        token = self._draw(logits, given, tables.lengths)
        about_rows = self._about(logits, token, shape.alternatives)
        last = last.at[jnp.where(draws, given["places"], last.shape[0])].set(token, mode="drop")
        if shape.prompt_alternatives < 0:
            return about_rows, jnp.zeros((0, 3), jnp.int32), last, pages
        of_prompts = model.logits(hidden[inputs.decode_tokens.size :], self.numerics)
        return about_rows, self._about(of_prompts, given["targets"].reshape(-1), shape.prompt_alternatives), last, pages

    def _draw(self, logits: Float[Array, "rows vocab"], given: dict[str, Array], position: Array) -> Int[Array, " rows"]:
        """A token for each row; by the same functions, keys and positions as `generate`'s."""
        if self.shape.banned:
            rows = jnp.arange(self.shape.rows, dtype=jnp.int32)[:, None]
            logits = logits.at[rows, given["banned"]].set(-jnp.inf, mode="drop")
        if not self.shape.sampled:
            return sample(logits, Sampling(), None)[0]
        sampling = Sampling(*(given[name] for name in ("temperature", "top_k", "top_p", "min_p")))
        keys = token_keys(_keys(given["seed"], given["fold"]), given["nth"], position)
        return sample(logits, sampling, keys, deterministic=self.numerics.deterministic)[0]

    def _about(
        self, logits: Float[Array, "rows vocab"], token: Int[Array, " rows"], alternatives: int
    ) -> Int[Array, "rows words"]:
        """Log-probability and rank of each row's token, and the most probable ones, under the model's own distribution."""
        logprob = token_logprobs(logits, token, deterministic=self.numerics.deterministic)
        if not alternatives:
            nothing = jnp.zeros((token.shape[0], 0), jnp.int32)
            return packed(token, logprob, jnp.zeros_like(token), nothing, nothing.astype(jnp.float32))
        own = jnp.take_along_axis(logits, token[:, None], axis=1)
        rank = jnp.sum(logits > own, axis=1, dtype=jnp.int32) + 1
        best, ids = lax.top_k(logits, alternatives)
        return packed(token, logprob, rank, ids, best - log_normaliser(logits)[:, None])


def _keys(seed: Array, fold: Array) -> Array:
    """The key of each row's request: that of its seed, folded with a number where that is not negative."""

    def key(seed: Array, fold: Array) -> Array:
        own = jax.random.key(seed)
        data = jnp.where(fold < 0, jax.random.key_data(own), jax.random.key_data(jax.random.fold_in(own, fold)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(own))

    return jax.vmap(key)(seed, fold)
