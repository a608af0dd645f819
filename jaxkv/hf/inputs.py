"""Token ids and masks as transformers pads them, turned to padding on the right and back; and caches that grow."""

import dataclasses
from typing import Any

import numpy as np

from jaxkv.cache.paged_kv_cache import PagedKVCache
from jaxkv.config import CacheConfig, pages_for
from jaxkv.decode.extend import pages_for_more
from jaxkv.model.decoder import Decoder
from jaxkv.programs import ladder


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch of prompts.

    Attributes:
      given: i32[batch, seq], as they were given.
      ids: i32[batch, seq], each row's tokens first.
      lengths: i32[batch], tokens of each row.
      source: i32[batch, seq], where in `ids` each given place went; -1 is padding.
    """

    given: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    source: np.ndarray

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, vocab_size: int) -> "Inputs":
        """Lists, NumPy, JAX or torch arrays.

        Raises:
          ValueError: they are no ids of the vocabulary, or ids and mask do not fit; one line, with the way out.
        """
        ids = token_array(input_ids)
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask has shape {list(mask.shape)}, but input_ids has {list(ids.shape)}")
        lengths = mask.sum(1).astype(np.int32)
        if (lengths == 0).any():
            raise ValueError(f"row {int(np.argmin(lengths))} of attention_mask is all padding: every prompt needs a token")
        if (np.diff(mask.astype(np.int8), axis=1) != 0).sum(1).max(initial=0) > 1:
            raise ValueError(
                "attention_mask must be padding on one side only, got 0s and 1s in turn: take the masked tokens out of input_ids, "
                "and pad"
            )
        wrong = ids[mask & ((ids < 0) | (ids >= vocab_size))]
        if wrong.size:
            raise ValueError(f"input_ids holds {wrong[0]}, which is outside the vocabulary (0 to {vocab_size - 1})")
        source = np.where(mask, np.cumsum(mask, axis=1) - 1, -1).astype(np.int32)
        order = np.argsort(~mask, axis=1, kind="stable")
        first = np.take_along_axis(np.where(mask, ids, 0), order, axis=1).astype(np.int32)
        return cls(ids.astype(np.int32), first, lengths, source)


def token_array(input_ids: Any) -> np.ndarray:
    """Ids as a NumPy array [batch, seq].

    Raises:
      ValueError: they are no such thing; one line, with the way out.
    """
    if hasattr(input_ids, "input_ids") or isinstance(input_ids, dict):
        raise ValueError("input_ids is all that the tokenizer gave: pass it as model.generate(**inputs)")
    try:
        ids = np.asarray(input_ids)
    except ValueError as error:
        raise ValueError("input_ids has rows of different lengths: pad them, with tokenizer(texts, padding=True)") from error
    if ids.dtype.kind in "US":
        raise ValueError('input_ids is text: pass token ids, as tokenizer(texts, return_tensors="np") gives them')
    if ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids must be [batch, seq], got one list of {len(ids)} ids: write [ids]")
    if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"input_ids must be integers [batch, seq], both at least 1, got {ids.dtype}{list(ids.shape)}")
    return ids


def with_room(model: Decoder, cache: PagedKVCache | None, lengths: np.ndarray, page_size: int) -> PagedKVCache:
    """A cache with room for `lengths` more tokens per row: new, as it is, or grown to twice its size."""
    batch = len(lengths)
    if cache is None:
        room = ladder.rung(2 * int(lengths.max()), 4 * page_size, 2, model.config.max_seq_len)
        pages = batch * pages_for(room, page_size) + 1
        sizes = CacheConfig(num_pages=pages, page_size=page_size, max_seqs=batch, max_seq_len=room)
        return PagedKVCache.of_sizes(model.config, sizes, model.mesh)
    if cache.max_seqs != batch:
        raise ValueError(f"past_key_values has {cache.max_seqs} rows, but input_ids {batch}")
    longest = int((np.asarray(cache.lengths) + lengths).max())
    if longest > model.config.max_seq_len:
        raise ValueError(f"{longest} tokens are more than the model allows ({model.config.max_seq_len})")
    need, free = pages_for_more(cache, lengths)
    wide = pages_for(min(2 * longest, model.config.max_seq_len), cache.page_size)
    if longest > cache.pages_per_seq * cache.page_size or need > free:
        return cache.grown(num_pages=max(cache.num_pages, need) * 2, pages_per_seq=max(wide, cache.pages_per_seq))
    return cache
