"""Best of n: a prompt computed once, n continuations sampled from it, and the one that a judge likes best."""

import functools
import sys

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.config import pages_for


@functools.partial(jax.jit, static_argnames=("n", "new_tokens", "judge"))
def best_of_n(model, prompt, key, *, n, new_tokens, judge, temperature=0.8):
    """prompt i32[width] -> the best i32[new_tokens], all n judgements, the cache; judge maps tokens and logprobs, both
    [n, new_tokens], to f32[n]."""
    width = prompt.shape[0]
    shared = width // 16  # full pages of the prompt; the rest each row has to itself
    num_pages = 1 + shared + n * (pages_for(width + new_tokens, 16) - shared)
    cache = jaxkv.PagedKVCache.create(model.config, num_pages=num_pages, max_seqs=n, max_seq_len=width + new_tokens)
    rows = jnp.arange(n)

    # The prompt into row 0 alone; then every row becomes row 0. That moves reference counts and copies nothing.
    logits, cache = jaxkv.extend(model, cache, jnp.tile(prompt[None], (n, 1)), jnp.where(rows == 0, width, 0))
    cache = cache.fork(jnp.zeros_like(rows), rows)
    sampling = jaxkv.Sampling(temperature=temperature).per_row(n)

    def step(state, key):
        logits, cache = state
        tokens, _ = jaxkv.sample(logits, sampling, jax.random.split(key, n))
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        return jaxkv.extend(model, cache, tokens[:, None], jnp.ones(n, jnp.int32)), (tokens, logprobs)

    start = (jnp.tile(logits[:1], (n, 1)), cache)
    (_, cache), (tokens, logprobs) = jax.lax.scan(step, start, jax.random.split(key, new_tokens))
    judged = judge(tokens.T, logprobs.T)
    return tokens.T[jnp.argmax(judged)], judged, cache


def likelihood(tokens, logprobs):
    """A judge: the mean log-probability. A reward model would stand in its place."""
    return jnp.mean(logprobs, axis=1)


if __name__ == "__main__":
    model, tokenizer = jaxkv.load(sys.argv[1] if len(sys.argv) > 1 else "default")
    prompt = jnp.array(tokenizer("The three primary colours are")["input_ids"])
    best, judged, cache = best_of_n(model, prompt, jax.random.key(0), n=8, new_tokens=16, judge=likelihood)
    print(f"{judged.max():.3f} is the best of", ", ".join(f"{x:.3f}" for x in judged))
    print(tokenizer.decode(best))
    print(cache.stats())
