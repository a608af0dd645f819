"""A decoder that is called the way transformers' models are."""

import os
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import ModelConfig
from jaxkv.decode.beam_search import beam_search
from jaxkv.decode.extend import extend
from jaxkv.decode.generate import generate
from jaxkv.decode.naive import generate_naive
from jaxkv.decode.overflow import overflow_message
from jaxkv.hf.inputs import Inputs, token_array, with_room
from jaxkv.hf.refused import CALL, GENERATE, refuse
from jaxkv.hf.request import Request
from jaxkv.hf.values import Count, Number, Truth
from jaxkv.model.decoder import Decoder, parameters_nbytes
from jaxkv.weights import GenerationDefaults, save


class CausalLMOutput(NamedTuple):
    """What calling the model gives: `logits` f32[batch, seq, vocab] (0 at masked tokens), `past_key_values` or None."""

    logits: jax.Array
    past_key_values: PagedKVCache | None


class CausalLM:
    """A `Decoder` that is called the way transformers' models are.

    Args:
      decoder: the model itself, for everything else in jaxkv.
      generation_config: what `generate` does where its caller says nothing; None leaves that to transformers' defaults.

    Raises:
      ValueError: `decoder` is no `Decoder`.
    """

    def __init__(self, decoder: Decoder, generation_config: GenerationDefaults | None = None):
        if not isinstance(decoder, Decoder):
            raise ValueError(f"CausalLM takes the Decoder, the first result of jaxkv.load, got a {type(decoder).__name__}")
        self.decoder = decoder
        self.generation_config = GenerationDefaults() if generation_config is None else generation_config

    @property
    def config(self) -> ModelConfig:
        """The decoder's `ModelConfig`."""
        return self.decoder.config

    def __repr__(self) -> str:
        c, said = self.config, self.generation_config.fields()
        megabytes = parameters_nbytes(self.decoder) / 1e6
        return (
            f"CausalLM({c.family}, {c.num_layers} layers, hidden_size {c.hidden_size}, vocab_size {c.vocab_size}, {c.dtype}, "
            f"{megabytes:,.1f} MB)\n"
            f"  .generation_config: {', '.join(f'{k}={v!r}' for k, v in said.items()) or 'says nothing'}\n"
            "  .decoder: the model for jaxkv.generate, stream, score, extend, ..."
        )

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        max_length: Count | None = None,
        max_new_tokens: Count | None = None,
        do_sample: Truth | None = None,
        temperature: Number | None = None,
        top_k: Count | None = None,
        top_p: Number | None = None,
        min_p: Number | None = None,
        num_beams: Count | None = None,
        num_return_sequences: Count | None = None,
        length_penalty: Number | None = None,
        early_stopping: Truth | str | None = None,
        eos_token_id: Any = None,
        pad_token_id: Count | None = None,
        use_cache: Truth | None = None,
        seed: Count = 0,
        **others: Any,
    ) -> np.ndarray:
        """Prompts and their continuations. None is the model's own `generation_config.json`, and without one transformers' default.

        Args:
          input_ids: [batch, seq] ids: lists, NumPy, JAX or CPU torch. Numbers, too, may be those of NumPy, JAX or torch.
          attention_mask: [batch, seq], 0 at padding, which may stand left or right.
          max_length: prompt and new tokens together; or max_new_tokens: the new ones alone; 20 new ones if nobody says.
          do_sample: sample with temperature (1), top_k (50), top_p and min_p; else greedy, or beam search.
          num_beams, length_penalty, early_stopping: beam search where num_beams > 1.
          num_return_sequences: results per prompt; more than one needs sampling or as many beams.
          eos_token_id, pad_token_id: the model's own by default; [] never ends.
          use_cache: False computes everything anew for every token, for comparison; the tokens are the same.
          seed: of the randomness (transformers takes torch's global state instead).
          **others: what transformers takes besides is refused by name, unless it asks for nothing.

        Returns:
          i32[batch * num_return_sequences, seq + new], padded on the right with pad_token_id, as long as the longest.

        Raises:
          ValueError: a value that cannot be met, or an argument that jaxkv does not have; the message names it and the way out.
        """
        refuse("generate", others, GENERATE)
        inputs = Inputs.of(input_ids, attention_mask, self.config.vocab_size)
        given = {
            "max_length": max_length, "max_new_tokens": max_new_tokens, "do_sample": do_sample, "temperature": temperature,
            "top_k": top_k, "top_p": top_p, "min_p": min_p, "num_beams": num_beams, "num_return_sequences": num_return_sequences,
            "length_penalty": length_penalty, "early_stopping": early_stopping, "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id, "use_cache": use_cache, "seed": seed,
        }  # fmt: skip
        return _answer(self.decoder, inputs, Request.of(given, self.generation_config, self.config, inputs))

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        past_key_values: PagedKVCache | None = None,
        *,
        use_cache: bool = True,
        page_size: int = 16,
        **others: Any,
    ) -> CausalLMOutput:
        """Logits of new tokens, and the cache that the next call takes.

        Args:
          input_ids: [batch, seq] new token ids.
          attention_mask: [batch, seq] or, as transformers has it, [batch, past + seq]; 0 at padding.
          past_key_values: the cache of the call before; it is used up (donated), and grows as needed.
          use_cache: False gives logits alone, from a forward pass without a cache.
          page_size: of a new cache.
          **others: as for `generate`.

        Raises:
          ValueError: shapes do not fit, the model allows fewer tokens, or an argument that jaxkv does not have.
        """
        refuse("CausalLM", others, CALL)
        new = token_array(input_ids)
        if attention_mask is not None:
            attention_mask = np.asarray(attention_mask)[:, -new.shape[1] :]
        inputs = Inputs.of(new, attention_mask, self.config.vocab_size)
        ids, lengths, source = inputs.ids, inputs.lengths, inputs.source
        if not use_cache:
            if past_key_values is not None:
                raise ValueError("past_key_values goes with use_cache=True")
            logits, past = self.decoder(np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, 0)), None
        else:
            past = with_room(self.decoder, past_key_values, lengths, page_size)
            logits, past = extend(self.decoder, past, ids, lengths, all_logits=True)
        traced = isinstance(logits, Tracer)
        of, known = (jnp, logits) if traced else (np, np.asarray(logits))  # jax would compile for each shape
        placed = of.take_along_axis(known, np.maximum(source, 0)[:, :, None], axis=1)
        placed = of.where((source >= 0)[:, :, None], placed, np.float32(0.0))
        return CausalLMOutput(placed if traced else jax.device_put(placed), past)

    def save_pretrained(self, folder: str | os.PathLike, tokenizer: Any = None) -> None:
        """`jaxkv.save` with the sampling defaults the model was loaded with.

        Args:
          folder: where to.
          tokenizer: a transformers tokenizer to save along; transformers saves it by `tokenizer.save_pretrained(folder)`.

        Raises:
          ValueError, OSError: as `jaxkv.save`.
        """
        save(self.decoder, folder, tokenizer=tokenizer, generation=self.generation_config)


def _answer(model: Decoder, inputs: Inputs, r: Request) -> np.ndarray:
    """The prompts as they were given, with their continuations behind them."""
    new = _new_tokens(model, inputs, r).reshape(len(inputs.lengths) * r.num_return_sequences, -1)
    new = new[:, : max(int((new >= 0).sum(1).max()), 1)]
    return np.concatenate([np.repeat(inputs.given, r.num_return_sequences, axis=0), np.where(new < 0, r.pad, new)], axis=1)


def _new_tokens(model: Decoder, inputs: Inputs, r: Request) -> np.ndarray:
    """[batch, num_return_sequences, new], -1 behind the end; says so where logits were not finite."""
    common = {"max_new_tokens": r.max_new_tokens, "eos_token_id": r.ends}
    if r.num_beams > 1:
        found = beam_search(
            model, inputs.ids, inputs.lengths, num_beams=r.num_beams, length_penalty=r.length_penalty,
            early_stopping=r.early_stopping, num_return_sequences=r.num_return_sequences, **common,
        )  # fmt: skip
        tokens, total = found.tokens, found.scores.size
        nonfinite = int(np.sum(np.isnan(found.scores) | (np.asarray(found.lengths) == 0)))  # no beam survives NaN
    elif r.use_cache:
        options = {"sampling": r.sampling, "key": r.key, "num_samples": r.num_return_sequences}
        out = generate(model, inputs.ids, inputs.lengths, **common, **options)
        tokens, nonfinite, total = out.tokens, int(out.stats.nonfinite), int(np.sum(out.lengths))
    else:
        tokens = generate_naive(model, inputs.ids, inputs.lengths, sampling=r.sampling, key=r.key, **common)[0]
        nonfinite = total = 0  # not counted there
    what = "tokens" if r.num_beams == 1 else "results"
    if message := overflow_message(nonfinite, total, model.config.dtype, what):
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    return np.asarray(tokens)
