"""Best-first search: nodes of the tree are rows of the cache, and a child is a fork of its parent plus one token.

The open node with the highest probability is expanded next, so the first one that reaches full depth is the most probable of all
sequences that take one of the `branch` best tokens at every turn: beam search may miss it, this cannot.
"""

import functools
import sys

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.config import pages_for


@functools.partial(jax.jit, static_argnames=("depth", "branch", "num_nodes"))
def tree_search(model, prompt, *, depth, branch, num_nodes):
    """prompt i32[width] -> tokens i32[depth], their log-probability, and nodes made; -1s if `num_nodes` (1 + a multiple of
    branch) were too few."""
    width = prompt.shape[0]
    own = pages_for(width + depth, 16) - width // 16  # a node shares all but these with its parent, often these too
    num_pages = 1 + width // 16 + num_nodes * own
    cache = jaxkv.PagedKVCache.create(model.config, num_pages=num_pages, max_seqs=num_nodes, max_seq_len=width + depth)
    rows = jnp.arange(num_nodes)
    logits, cache = jaxkv.extend(model, cache, jnp.tile(prompt[None], (num_nodes, 1)), jnp.where(rows == 0, width, 0))
    scores = jnp.where(rows == 0, 0.0, -jnp.inf)  # of open nodes; -inf for nodes expanded or not made
    path = jnp.full((num_nodes, depth), -1)

    def going(state):
        cache, _, scores, _, made = state
        return (cache.lengths[jnp.argmax(scores)] < width + depth) & (made + branch <= num_nodes)

    def expand(state):
        cache, logits, scores, path, made = state
        node = jnp.argmax(scores)
        logprobs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits[node]), branch)
        children = made + jnp.arange(branch)
        at = cache.lengths[node] - width
        path = path.at[children].set(path[node]).at[children, at].set(tokens)
        scores = scores.at[children].set(scores[node] + logprobs).at[node].set(-jnp.inf)

        cache = cache.fork(jnp.full(branch, node), children)
        fed = jnp.zeros((num_nodes, 1), jnp.int32).at[children, 0].set(tokens)
        new, cache = jaxkv.extend(model, cache, fed, jnp.zeros(num_nodes, jnp.int32).at[children].set(1))
        return cache, logits.at[children].set(new[children]), scores, path, made + branch

    state = (cache, logits, scores, path, jnp.int32(1))
    cache, _, scores, path, made = jax.lax.while_loop(going, expand, state)
    best = jnp.argmax(scores)
    found = cache.lengths[best] == width + depth
    return jnp.where(found, path[best], -1), scores[best], made


if __name__ == "__main__":
    model, tokenizer = jaxkv.load(sys.argv[1] if len(sys.argv) > 1 else "default")
    prompt = jnp.array(tokenizer("The capital of France is")["input_ids"])
    tokens, score, made = tree_search(model, prompt, depth=5, branch=3, num_nodes=64)
    print(f"log-probability {score:.3f}, {made} nodes:", tokenizer.decode(tokens[tokens >= 0]))
