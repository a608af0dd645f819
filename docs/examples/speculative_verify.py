"""Speculative decoding by hand: a small model guesses k tokens, the large one checks them all in one call.

`jaxkv.generate(..., speculative=...)` has this built in, with a scheduler, sampling and end tokens.
"""

import functools
import sys

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.config import pages_for


@functools.partial(jax.jit, static_argnames=("new_tokens", "k"))
def speculate(model, draft, prompts, *, new_tokens, k=4):
    """Greedy tokens of `model`, i32[rows, new_tokens], whatever `draft` guesses, and how many calls of `model` it took."""
    rows, width = prompts.shape
    room = width + new_tokens + k
    create = functools.partial(
        jaxkv.PagedKVCache.create, num_pages=1 + rows * pages_for(room, 16), max_seqs=rows, max_seq_len=room
    )
    full = jnp.full(rows, width - 1)
    _, cache = jaxkv.extend(model, create(model.config), prompts, full)  # all but the last token, which begins the first round
    _, cache_d = jaxkv.extend(draft, create(draft.config), prompts, full)

    def round_(state):
        cache, cache_d, last, out, count, calls = state
        active = (count < new_tokens).astype(jnp.int32)

        def guess(state, _):
            token, cache_d = state
            logits, cache_d = jaxkv.extend(draft, cache_d, token[:, None], active)
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache_d), token

        (_, cache_d), fed = jax.lax.scan(guess, (last, cache_d), length=k + 1)  # [k + 1, rows]: the last token, then guesses
        logits, cache = jaxkv.extend(model, cache, fed.T, (k + 1) * active, all_logits=True)
        true = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [rows, k + 1], true[:, i] follows fed[i]
        right = jnp.cumprod((true[:, :-1] == fed.T[:, 1:]).astype(jnp.int32), axis=1)
        taken = active * (1 + jnp.sum(right, axis=1))  # the right guesses, and the one after them

        nth = jnp.arange(k + 1)[None, :]
        place = jnp.where(nth < taken[:, None], count[:, None] + nth, new_tokens)
        out = out.at[jnp.arange(rows)[:, None], place].set(true, mode="drop")
        last = jnp.where(taken > 0, true[jnp.arange(rows), jnp.maximum(taken - 1, 0)], last)
        kept = cache.lengths - (k + 1) * active + taken  # the wrong guesses' keys and values are forgotten
        return cache.truncate(kept), cache_d.truncate(kept), last, out, count + taken, calls + 1

    empty = jnp.zeros((rows, new_tokens), jnp.int32)
    state = (cache, cache_d, prompts[:, -1], empty, jnp.zeros(rows, jnp.int32), jnp.int32(0))
    *_, out, _, calls = jax.lax.while_loop(lambda s: jnp.any(s[4] < new_tokens), round_, state)
    return out, calls


if __name__ == "__main__":
    model, tokenizer = jaxkv.load(sys.argv[1] if len(sys.argv) > 1 else "default")
    prompt = jnp.array([tokenizer("one two three four one two three four one two")["input_ids"]])
    tokens, calls = speculate(model, model, prompt, new_tokens=24)  # a draft as good as the model: every guess is right
    print(f"24 tokens by {calls} calls:", tokenizer.decode(tokens[0]))
