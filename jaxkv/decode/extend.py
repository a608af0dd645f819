"""`extend`: new tokens for any rows of a cache, by hand."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxkv.cache.paged_kv_cache import PagedKVCache, check_cache
from jaxkv.decode.prompts import check_flags, numerics_of
from jaxkv.decode.rungs import cut, pad, shapes_are_the_callers
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.model.segments import Segment
from jaxkv.model.token_ids import ROWS, ArrayLike, as_int32, check_tokens, read_counts, read_rectangle
from jaxkv.ops.numerics import Numerics
from jaxkv.programs import ladder, waiting_on_compiler
from jaxkv.sharding import by_rows, like, within
from pallas_kernels.varying import vary_like


def extend(
    model: Decoder,
    cache: PagedKVCache,
    tokens: Int[Array | np.ndarray, "seqs chunk"] | Sequence[Sequence[int]],
    num_tokens: Int[Array | np.ndarray, " seqs"] | Sequence[int],
    *,
    all_logits: bool = False,
    implementation: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "seqs *chunk vocab"], PagedKVCache]:
    """Append tokens to every row of the cache: allocates pages, writes keys and values, attends.

    Prefill, a later chunk of it, and decode (chunk = 1) are this one call.

    Args:
      model: the decoder.
      cache: donated when called outside jit: use the returned one.
      tokens: token ids, each row's real ones first.
      num_tokens: how many of each row's tokens are real, 0 to chunk; 0 leaves a row as it is.
      all_logits: return logits of all positions instead of each row's last.
      implementation: of the attention kernel, see `pallas_kernels.paged_attention`.
      deterministic: a row's bits do not depend on the other rows, nor on how its tokens are cut into chunks.

    Returns:
      float32 logits, `[seqs, vocab]` of each row's last new token, or `[seqs, chunk, vocab]`; zeros where there is no new
      token. And the cache. Inside jit a row that gets no pages takes none of its tokens, and `cache.out_of_pages` says so.

    Raises:
      ValueError: (outside jit) a token id or a count is out of range, a row would outgrow its table or the model, or the pool
        has too few free pages; nothing has happened then, and the cache given is still good.
    """
    check_decoder(model)
    check_cache(cache)
    check_flags(all_logits=all_logits)
    ids = read_rectangle(tokens)
    if ids.shape[0] != cache.max_seqs:
        raise ValueError(f"tokens must be [seqs, chunk] with seqs = {cache.max_seqs} and chunk > 0, got shape {ids.shape}")
    count = read_counts("num_tokens", num_tokens, cache.max_seqs, 0, ids.shape[1])
    if count is None:
        raise ValueError(f"num_tokens must say how many tokens of each row are real, [{cache.max_seqs}], got None")
    check_tokens(ids, count, model.config.vocab_size, ROWS.tokens)
    arguments = (model, cache, as_int32(ids), count, bool(all_logits), numerics_of(implementation, deterministic))
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments[:4])):
        return _extend(*arguments)
    _check_room(cache, np.asarray(count), model.config.max_seq_len)
    if shapes_are_the_callers(ids, count, cache.lengths):
        return _extend_jit(*arguments)
    width = ids.shape[1]
    padded = pad(as_int32(ids), cache.max_seqs, ladder.computed(width))
    with waiting_on_compiler(f"extend for {cache.max_seqs} rows, up to {padded.shape[1]} tokens of each"):
        logits, cache = _extend_jit(model, cache, padded, *arguments[3:])
    return (cut(logits, cache.max_seqs, width) if all_logits and padded.shape[1] > width else logits), cache


@jax.jit
def _pages_for(cache: PagedKVCache, num_tokens: Array) -> tuple[Array, Array]:
    return jnp.sum(cache.pages_needed(num_tokens), dtype=jnp.int32), cache.num_free


def pages_for_more(cache: PagedKVCache, num_tokens: Int[np.ndarray, " seqs"]) -> tuple[int, int]:
    """Pages that so many more tokens of each row need, and those that are free; outside jit, by one program for all numbers."""
    need, free = _pages_for(cache, num_tokens.astype(np.int32))
    return int(need), int(free)


def _check_room(cache: PagedKVCache, num_tokens: np.ndarray, allowed: int) -> None:
    room = cache.pages_per_seq * cache.page_size
    lengths, most = np.asarray(cache.lengths), min(room, allowed)
    long = np.flatnonzero((num_tokens > 0) & (lengths + num_tokens > most))
    if long.size:
        row = long[0]
        raise ValueError(
            f"row {row} holds {lengths[row]} tokens and cannot take {num_tokens[row]} more: "
            f"its block table has room for {room} and the model allows {allowed}"
        )
    stuck = np.flatnonzero((num_tokens > 0) & np.asarray(cache.out_of_pages))
    if stuck.size:
        raise ValueError(f"rows {stuck.tolist()} ran out of pages earlier and have a gap: free them before extending them")
    need, free = pages_for_more(cache, num_tokens)
    if need > free:
        raise ValueError(
            f"out of pages: the new tokens need {need} pages and {free} of {cache.num_pages - 1} are free; free rows, "
            f"or create the cache with num_pages >= {cache.num_pages + need - free}"
        )


def _extend(
    model: Decoder, cache: PagedKVCache, tokens: ArrayLike, num_tokens: ArrayLike, all_logits: bool, numerics: Numerics
) -> tuple[Array, PagedKVCache]:
    run = functools.partial(_run, all_logits, numerics)
    tokens, num_tokens = jnp.asarray(tokens), jnp.asarray(num_tokens)
    logits, new = within(run, tokens, num_tokens, model, cache)
    return by_rows(logits, tokens, num_tokens, model, cache), jax.tree.map(like, new, cache)


def _run(
    all_logits: bool, numerics: Numerics, tokens: Array, num_tokens: Array, model: Decoder, cache: PagedKVCache
) -> tuple[Array, PagedKVCache]:
    seqs, chunk = tokens.shape
    num_tokens = num_tokens.astype(jnp.int32)
    cache = vary_like(cache, model, tokens, num_tokens).allocate(num_tokens, max_tokens=chunk)
    count = jnp.where(cache.out_of_pages, 0, num_tokens)
    cache = cache.advance(count)
    segment, flat = Segment(None, cache.lengths, count, queries=chunk), tokens.astype(jnp.int32).reshape(-1)
    hidden, pages = model.forward_paged(flat, (segment,), cache.tables, cache.pages, numerics)
    if all_logits:
        real = jnp.arange(chunk, dtype=jnp.int32)[None, :] < count[:, None]
        logits = model.logits(hidden, numerics, real.reshape(-1)).reshape(seqs, chunk, -1)
    else:
        last = hidden.reshape(seqs, chunk, -1)[jnp.arange(seqs, dtype=jnp.int32), jnp.maximum(count - 1, 0)]
        real = count > 0
        logits = model.logits(last, numerics, real)
    return jnp.where(real[..., None], logits, 0.0), cache.with_pages(pages)


_extend_jit = functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=(1,))(_extend)
