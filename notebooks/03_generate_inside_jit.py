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
# # Generate inside jit
#
# The scheduler of `jaxkv.generate` is arrays all the way down: prompts wait, rows end and are refilled, pages are taken and given
# back, all within one `while_loop` on the device. So it can stand inside your own `jax.jit`.

# %%
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jaxkv
from jaxkv import viz

config = jaxkv.ModelConfig(
    "llama",
    64,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_seq_len=256,
    rope=jaxkv.Rope(rotary_dim=16),
)
model = jaxkv.Decoder(config, rngs=nnx.Rngs(0))
model = jax.tree.map(lambda w: 4 * w, model)  # an untrained model writes one token over and over; larger weights vary it

# %% [markdown]
# ## Continuous batching in one jit
#
# 16 requests with different numbers of tokens to write, 4 rows. A static batch waits for its longest member; here a row that ends is
# refilled at once.

# %%
random = np.random.default_rng(1)
limits = jnp.asarray(np.clip(random.lognormal(2.7, 0.8, 16), 2, 64).astype(np.int32))
prompts = jnp.asarray(random.integers(0, 64, (16, 24)).astype(np.int32))


@jax.jit
def roll_out(model, prompts, limits, key):
    out = jaxkv.generate(
        model,
        prompts,
        max_new_tokens=64,
        token_limits=limits,
        max_seqs=4,
        sampling=jaxkv.Sampling(temperature=0.8),
        key=key,
        page_size=8,
    )
    reward = jnp.sum(out.tokens == 7, axis=-1)  # anything of your own, in the same program
    return out, reward


out, reward = roll_out(model, prompts, limits, jax.random.key(0))
np.testing.assert_array_equal(out.lengths[:, 0], limits)
decode = int(limits.sum())
static = sum(int(limits[i : i + 4].max()) for i in range(0, 16, 4))
print(
    f"{decode} tokens in {int(out.stats.steps)} steps, prefill included; static batches of 4 would need {static} decode steps alone"
)
assert int(out.stats.steps) < static + 16
out

# %% [markdown]
# What the rows did, step by step (the slider shows pages being handed from one request to the next):

# %%
recording = viz.record(model, prompts[:8], max_new_tokens=64, token_limits=limits[:8], max_seqs=4, page_size=8, num_pages=36)
viz.timeline(recording, max_frames=20)

# %%
figure, axis = plt.subplots(figsize=(7, 2.2))
rows = np.stack([frame.requests for frame in recording.frames]).T
axis.imshow(np.where(rows < 0, np.nan, rows), aspect="auto", cmap="tab10", interpolation="nearest", vmin=0, vmax=9)
axis.set(xlabel="step", ylabel="row", yticks=range(4), title="which request a row works on")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Shared prompts
#
# Eight samples of one prompt of 128 tokens: its pages are computed once and shared.

# %%
long_prompt = jnp.asarray(random.integers(0, 64, (1, 128)).astype(np.int32))
sampled = {"max_new_tokens": 16, "sampling": jaxkv.Sampling(temperature=1.0), "key": jax.random.key(1), "page_size": 8}
shared = viz.record(model, long_prompt, num_samples=8, **sampled)
apart = jaxkv.generate(model, jnp.tile(long_prompt, (8, 1)), **sampled)
pages = int(shared.output.stats.peak_pages), int(apart.stats.peak_pages)
print(f"peak pages: {pages[0]} shared, {pages[1]} apart, {pages[1] / pages[0]:.1f} times as many")
assert pages[0] * 2 < pages[1]
viz.page_map(shared.fullest)

# %% [markdown]
# ## Streaming out
#
# `stream` is the same scheduler, looked at from the host between steps. Or let `generate` call you, from inside jit:

# %%
heard = []
streamed = [(t.prompt, t.position, t.token) for t in jaxkv.stream(model, prompts[:2], max_new_tokens=6)]
told = jaxkv.generate(model, prompts[:2], max_new_tokens=6, on_token=lambda p, s, i, token: heard.append((p, i, token)))
jax.block_until_ready(told.tokens)
jax.effects_barrier()
print(streamed[:4])
assert sorted(streamed) == sorted(heard)

# %% [markdown]
# ## Beams
#
# Beams are rows; moving a beam swaps block tables and copies nothing. The score of the best is at least that of the greedy text.

# %%
greedy = jaxkv.generate(model, prompts[:2], max_new_tokens=12)
beams = jaxkv.beam_search(model, prompts[:2], num_beams=4, max_new_tokens=12, length_penalty=0.0)
print("greedy", np.round(np.sum(greedy.logprobs, axis=(1, 2)), 3), "beams", np.round(beams.scores[:, 0], 3))
print("peak pages:", int(beams.peak_pages), "for 8 beams")

# %% [markdown]
# ## A small tree search
#
# Nodes are rows, expanding one is a fork and one `extend`. This is `docs/examples/tree_search.py`, jitted as a whole; it finds the most
# probable sequence among all that take one of the three best tokens at each turn.

# %%
root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "docs" / "examples").is_dir())
sys.path.insert(0, str(root / "docs" / "examples"))
from tree_search import tree_search

tokens, score, made = tree_search(model, prompts[0], depth=3, branch=3, num_nodes=40)
first = float(jnp.sum(jaxkv.generate(model, prompts[:1], max_new_tokens=3).logprobs))
print(f"tree: {float(score):.3f} with {int(made)} of 40 nodes; greedy: {first:.3f}")
assert float(score) >= first - 1e-4

# %% [markdown]
# Next: [04_train_and_roll_out](04_train_and_roll_out.ipynb).
