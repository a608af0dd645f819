# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why a KV cache
#
# A decoder writes one token at a time, and every new token attends to all tokens before it. This notebook starts from attention
# without a cache, adds one, and measures what it does to the time per token, first on a small OPT, then on a real model.
#
# The chain of argument: keys and values of a token depend on that token and those before it, never on later ones. So they never
# change once computed, and computing them again for every new token is waste.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jaxkv
from jaxkv import families

# %% [markdown]
# ## Attention, twice
#
# One head, eight tokens. Without a cache each step computes keys and values of the whole sequence; with one it computes a single new
# row of each and appends it.

# %%
random = np.random.default_rng(0)
dim, tokens = 16, 8
x = random.normal(size=(tokens, dim))
w_q, w_k, w_v = random.normal(size=(3, dim, dim)) / dim**0.5


def softmax(scores):
    e = np.exp(scores - scores.max())
    return e / e.sum()


work = {"without": 0, "with": 0}  # rows multiplied by w_k and w_v
k_cache, v_cache = np.zeros((0, dim)), np.zeros((0, dim))
for n in range(1, tokens + 1):
    q = x[n - 1] @ w_q
    k, v = x[:n] @ w_k, x[:n] @ w_v
    work["without"] += 2 * n
    without = softmax(k @ q / dim**0.5) @ v

    k_cache, v_cache = np.vstack([k_cache, x[n - 1] @ w_k]), np.vstack([v_cache, x[n - 1] @ w_v])
    work["with"] += 2
    cached = softmax(k_cache @ q / dim**0.5) @ v_cache
    np.testing.assert_allclose(cached, without, atol=1e-12)
print("the same outputs; rows multiplied:", work)

# %% [markdown]
# For $n$ tokens that is $n(n+1)$ against $2n$ rows, and the same holds for every layer around it: without a cache all of the model runs
# over the whole sequence for each token.
#
# ## `use_cache` on and off: a small OPT
#
# OPT's architecture (learned positions, ReLU, biases) with random weights, from the fields of its `config.json`. With
# `jaxkv.CausalLM` it answers to the names of transformers.

# %%
config = families.from_hf(
    {
        "model_type": "opt",
        "vocab_size": 512,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "do_layer_norm_before": True,
    }
)
opt = jaxkv.CausalLM(jaxkv.Decoder(config, rngs=nnx.Rngs(0)))
prompt = np.arange(10, 26)[None, :]
written = {cache: opt.generate(prompt, max_length=48, use_cache=cache, do_sample=False) for cache in (True, False)}
np.testing.assert_array_equal(written[True], written[False])
print(written[True][0, 16:])

# %% [markdown]
# The tokens are equal. Now the time of one more token after a sequence of a given length: without a cache a pass over the sequence,
# with one `extend` by a single token. Compilation is not counted; the best of several runs is taken.


# %%
def best(run, times=5):
    """Seconds of the fastest of several runs, after one that compiles."""
    jax.block_until_ready(run())
    out = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        out.append(time.perf_counter() - begin)
    return min(out)


def seconds_without(model, length):
    tokens = jnp.ones((1, length), jnp.int32)
    forward = jax.jit(lambda m, t: jnp.argmax(m(t)[:, -1], axis=-1))
    return best(lambda: forward(model, tokens))


def seconds_with(model, lengths):
    """One more token behind each of the lengths: one cache, one compiled step, filled further and further."""
    cache = jaxkv.PagedKVCache.create(model.config, num_pages=max(lengths) // 16 + 4, max_seqs=1, max_seq_len=max(lengths) + 32)
    chunk, one, out = 64, jnp.ones((1, 1), jnp.int32), []
    step = jax.jit(lambda m, c: jaxkv.extend(m, c, one, jnp.ones(1, jnp.int32)), donate_argnums=(1,))
    held = 0
    for length in lengths:
        while held < length:
            _, cache = jaxkv.extend(model, cache, jnp.ones((1, chunk), jnp.int32), jnp.array([min(chunk, length - held)]))
            held = min(held + chunk, length)
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            logits, cache = step(model, cache)
            jax.block_until_ready(logits)
            times.append(time.perf_counter() - begin)
            held += 1
        out.append(min(times))
    return out, cache


lengths = [32, 128, 256, 512, 960]
without = [seconds_without(opt.decoder, n) for n in lengths]
cached, cache = seconds_with(opt.decoder, lengths)


# %%
def plot(title, lengths, without, cached):
    figure, axis = plt.subplots(figsize=(6, 3.2))
    axis.plot(lengths, np.multiply(without, 1e3), "o-", label="use_cache=False")
    axis.plot(lengths, np.multiply(cached, 1e3), "s-", label="use_cache=True")
    axis.set(xlabel="tokens so far", ylabel="ms for one more token", title=title)
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.tight_layout()
    plt.show()
    for n, a, b in zip(lengths, without, cached):
        print(f"{n:5} tokens: {a * 1e3:7.1f} ms without, {b * 1e3:6.1f} ms with, {a / b:5.1f} times")


plot("OPT, 4 layers, random weights", lengths, without, cached)

# %% [markdown]
# Without a cache the time grows with the length; with one it hardly does.
#
# ## The same on a real model
#
# SmolLM2-135M-Instruct, 30 layers. First the text, both ways:

# %%
model, tokenizer = jaxkv.load("default")
ids = np.array([tokenizer("A key is what a token offers, a value is")["input_ids"]])
smol = jaxkv.CausalLM(model)
on = smol.generate(ids, max_new_tokens=12, use_cache=True)
off = smol.generate(ids, max_new_tokens=12, use_cache=False)
np.testing.assert_array_equal(on, off)
print(tokenizer.decode(on[0]))

# %%
lengths_real = [32, 128, 384]
without_real = [seconds_without(model, n) for n in lengths_real]
cached_real, cache = seconds_with(model, lengths_real)
plot("SmolLM2-135M-Instruct", lengths_real, without_real, cached_real)
gain = without_real[-1] / cached_real[-1]
assert gain > 2, f"a cache must pay at {lengths_real[-1]} tokens"

# %% [markdown]
# ## What it costs
#
# Memory: keys and values of every token in every layer. And that memory is what this library is about: where it lies, who shares it, and
# how little of it stays empty. The cache draws itself:

# %%
per_token = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * cache.pages[0].k.dtype.itemsize
print(f"{per_token / 1024:.0f} KiB a token, {per_token * 2048 / 2**20:.0f} MiB for a sequence of 2,048")
cache

# %% [markdown]
# Next: [02_paged_cache](02_paged_cache.ipynb), how to spend that memory well.
