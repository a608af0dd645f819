"""The names and conventions of transformers: `AutoModelForCausalLM.from_pretrained(...).generate(**inputs, max_length=100)`.

A thin layer over `load`, `generate` and `extend`: left padding by attention mask becomes right padding and back, and
`past_key_values` is a `PagedKVCache`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import pages_for
from jaxkv.decode.beam_search import beam_search
from jaxkv.decode.extend import extend
from jaxkv.decode.generate import generate
from jaxkv.decode.naive import generate_naive
from jaxkv.decode.sampling import Sampling
from jaxkv.model.decoder import Decoder
from jaxkv.weights import load

DEFAULT_MAX_LENGTH = 20
"""transformers' own: prompt and new tokens together, when neither max_length nor max_new_tokens is given."""


class CausalLMOutput(NamedTuple):
    """What calling the model gives: `logits` f32[batch, seq, vocab] (0 at masked tokens), `past_key_values` or None."""

    logits: jax.Array
    past_key_values: PagedKVCache | None


class CausalLM:
    """A `Decoder` that is called the way transformers' models are.

    Args:
      decoder: the model itself, for everything else in jaxkv.
    """

    def __init__(self, decoder: Decoder):
        self.decoder = decoder

    @property
    def config(self) -> Any:
        """The decoder's `ModelConfig`."""
        return self.decoder.config

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        min_p: float = 0.0,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        eos_token_id: Any = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        seed: int = 0,
    ) -> np.ndarray:
        """Prompts and their continuations.

        Args:
          input_ids: [batch, seq] ids: lists, NumPy, JAX or CPU torch.
          attention_mask: [batch, seq], 0 at padding, which may stand left or right.
          max_length: prompt and new tokens together; or max_new_tokens: the new ones alone.
          do_sample: sample with temperature, top_k, top_p and min_p (transformers' defaults); else greedy, or beam search.
          num_beams, length_penalty, early_stopping: beam search where num_beams > 1.
          num_return_sequences: results per prompt; more than one needs sampling or as many beams.
          eos_token_id, pad_token_id: the model's own by default.
          use_cache: False computes everything anew for every token, for comparison; the tokens are the same.
          seed: of the randomness (transformers takes torch's global state instead).

        Returns:
          i32[batch * num_return_sequences, seq + new], padded on the right with pad_token_id, as long as the longest.

        Raises:
          ValueError: values that cannot be met, or the prompts fill max_length already.
        """
        ids, lengths, _ = _right_padded(input_ids, attention_mask)
        prompt = np.asarray(input_ids)
        if max_new_tokens is None:
            max_length = DEFAULT_MAX_LENGTH if max_length is None else max_length
            max_new_tokens = int(max_length) - ids.shape[1]
        assert max_new_tokens is not None
        if max_new_tokens < 1:
            raise ValueError(
                f"max_length is {max_length}, but the prompts have {ids.shape[1]} tokens already: raise it, or use max_new_tokens"
            )
        ends = self.config.eos_token_ids if eos_token_id is None else eos_token_id
        pad = self._pad_id(ends) if pad_token_id is None else pad_token_id
        common = {"max_new_tokens": max_new_tokens, "eos_token_id": ends}
        if num_beams > 1:
            if do_sample or not use_cache:
                raise ValueError("num_beams > 1 goes with do_sample=False and use_cache=True")
            out = beam_search(
                self.decoder, ids, lengths, num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping,
                num_return_sequences=num_return_sequences, **common,
            )  # fmt: skip
            new = out.tokens
        else:
            if num_return_sequences > 1 and not do_sample:
                raise ValueError(f"num_return_sequences={num_return_sequences} greedy results would all be the same: sample")
            sampling = Sampling(temperature, top_k, top_p, min_p) if do_sample else Sampling()
            common |= {"sampling": sampling, "key": jax.random.key(seed)}
            if use_cache:
                new = generate(self.decoder, ids, lengths, num_samples=num_return_sequences, **common).tokens
            elif num_return_sequences > 1:
                raise ValueError("num_return_sequences > 1 needs use_cache=True")
            else:
                new = generate_naive(self.decoder, ids, lengths, **common)[0][:, None]
        new = np.asarray(new).reshape(prompt.shape[0] * num_return_sequences, -1)
        new = new[:, : max(int((new >= 0).sum(1).max()), 1)]
        repeated = np.repeat(prompt, num_return_sequences, axis=0).astype(np.int32)
        return np.concatenate([repeated, np.where(new < 0, pad, new)], axis=1)

    def _pad_id(self, eos: Any) -> int:
        if self.config.pad_token_id is not None:
            return self.config.pad_token_id
        return int(np.ravel(eos)[0]) if np.size(eos) else 0

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        past_key_values: PagedKVCache | None = None,
        *,
        use_cache: bool = True,
        page_size: int = 16,
    ) -> CausalLMOutput:
        """Logits of new tokens, and the cache that the next call takes.

        Args:
          input_ids: [batch, seq] new token ids.
          attention_mask: [batch, seq] or, as transformers has it, [batch, past + seq]; 0 at padding.
          past_key_values: the cache of the call before; it is used up (donated), and grows as needed.
          use_cache: False gives logits alone, from a forward pass without a cache.
          page_size: of a new cache.

        Raises:
          ValueError: shapes do not fit, or the model allows fewer tokens.
        """
        count = np.asarray(input_ids).shape[-1]
        if attention_mask is not None:
            attention_mask = np.asarray(attention_mask)[:, -count:]
        ids, lengths, source = _right_padded(input_ids, attention_mask)
        if not use_cache:
            if past_key_values is not None:
                raise ValueError("past_key_values goes with use_cache=True")
            logits, past = self.decoder(np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, 0)), None
        else:
            past = _with_room(self.decoder, past_key_values, lengths, page_size)
            logits, past = extend(self.decoder, past, jnp.asarray(ids), jnp.asarray(lengths), all_logits=True)
        placed = jnp.take_along_axis(logits, jnp.asarray(np.maximum(source, 0))[:, :, None], axis=1)
        return CausalLMOutput(jnp.where(jnp.asarray(source >= 0)[:, :, None], placed, 0.0), past)


class AutoModelForCausalLM:
    """Loads models by name; see `from_pretrained`."""

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, dtype: Any = None) -> CausalLM:
        """A model from a hub id, a local folder or a .gguf file; arguments and errors as for `jaxkv.load`.

        The tokenizer comes from `transformers.AutoTokenizer`, or as the second result of `jaxkv.load`.
        """
        return CausalLM(load(name_or_path, dtype=dtype)[0])


def _right_padded(input_ids: Any, attention_mask: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids with padding on the right, lengths, and for each place of the input where its token went (-1: padding)."""
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids must be integers [batch, seq], both at least 1, got {ids.dtype}{list(ids.shape)}")
    mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, but input_ids has {list(ids.shape)}")
    lengths = mask.sum(1).astype(np.int32)
    if (lengths == 0).any():
        raise ValueError(f"row {int(np.argmin(lengths))} of attention_mask is all padding: every prompt needs a token")
    if (np.diff(mask.astype(np.int8), axis=1) != 0).sum(1).max(initial=0) > 1:
        raise ValueError("attention_mask must be padding on one side only, got 0s and 1s in turn")
    source = np.where(mask, np.cumsum(mask, axis=1) - 1, -1).astype(np.int32)
    order = np.argsort(~mask, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1).astype(np.int32), lengths, source


def _with_room(model: Decoder, cache: PagedKVCache | None, lengths: np.ndarray, page_size: int) -> PagedKVCache:
    """A cache with room for `lengths` more tokens per row: new, as it is, or grown to twice its size."""
    batch = len(lengths)
    if cache is None:
        room = min(max(2 * int(lengths.max()), 4 * page_size), model.config.max_seq_len)
        pages = batch * pages_for(room, page_size) + 1
        return PagedKVCache.create(model.config, num_pages=pages, page_size=page_size, max_seqs=batch, max_seq_len=room)
    if cache.max_seqs != batch:
        raise ValueError(f"past_key_values has {cache.max_seqs} rows, but input_ids {batch}")
    longest = int((np.asarray(cache.lengths) + lengths).max())
    if longest > model.config.max_seq_len:
        raise ValueError(f"{longest} tokens are more than the model allows ({model.config.max_seq_len})")
    need = int(np.asarray(cache.pages_needed(jnp.asarray(lengths))).sum())
    wide = pages_for(min(2 * longest, model.config.max_seq_len), cache.page_size)
    if longest > cache.pages_per_seq * cache.page_size or need > int(cache.num_free):
        return cache.grown(num_pages=max(cache.num_pages, need) * 2, pages_per_seq=max(wide, cache.pages_per_seq))
    return cache
