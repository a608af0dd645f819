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
# # A cache in pages
#
# Sequences grow one token at a time and nobody knows how long they will get. A contiguous cache must reserve room for the longest one it
# allows. A paged cache cuts the memory into pages of, say, 16 tokens and gives a sequence the next page when it needs it. Each row
# of the batch has a *block table*: the numbers of its pages, in order.
#
# The model here is tiny and random; what is shown depends on the bookkeeping alone.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import jaxkv
from jaxkv import viz

config = jaxkv.ModelConfig(
    "llama",
    64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_seq_len=256,
    rope=jaxkv.Rope(rotary_dim=8),
)
model = jaxkv.Decoder(config, rngs=nnx.Rngs(0))

# %% [markdown]
# ## Pages and block tables
#
# A pool of 32 pages for 4 rows. Page 0 is the *null page*: nothing live is ever in it, and unused table entries point at it.
# Two prompts move in, of 37 and 20 tokens; their tokens are padded to one shape, `num_tokens` says how many are real.

# %%
cache = jaxkv.PagedKVCache.create(config, num_pages=32, page_size=8, max_seqs=4, max_seq_len=128)
prompts = jnp.arange(4 * 37).reshape(4, 37) % 64
logits, cache = jaxkv.extend(model, cache, prompts, jnp.array([37, 20, 0, 0]))
cache

# %% [markdown]
# 37 tokens need 5 pages, the last one holding 5 of 8. At most one page of a row is ever partly filled, so that waste is bounded by
# a page a row, whatever the lengths.
#
# ## Fork: sharing without copying
#
# Row 2 becomes row 0. No page is copied; reference counts go up. Striped pages belong to several rows.

# %%
before = cache.stats()
cache = cache.fork(0, 2)
after = cache.stats()
assert after.pages_used == before.pages_used and after.pages_shared == 5
cache

# %% [markdown]
# ## Copy-on-write: a page of one's own, when needed
#
# Both rows go on with a token of their own. It would go into the partly filled page they share, so one of them gets a copy of that
# page first: one page, and no other.

# %%
shared_page = int(cache.block_tables[0, 4])
logits, cache = jaxkv.extend(model, cache, jnp.array([[7], [0], [9], [0]]), jnp.array([1, 0, 1, 0]))
own = [int(cache.block_tables[row, 4]) for row in (0, 2)]
print("the fifth page of rows 0 and 2: was", shared_page, "for both, now", own)
assert own[0] != own[1] and shared_page in own and cache.stats().pages_shared == 4
cache

# %% [markdown]
# When a row is freed, pages that nobody else names return to the pool. `check()` raises if a page were lost, freed twice or shared
# without a count.

# %%
cache = cache.free([0, 1])
cache.check()
print(viz.page_map(cache))  # in a terminal it looks like this

# %% [markdown]
# ## Fragmentation, measured
#
# 24 requests of very different lengths pass through 8 rows; `viz.record` runs `generate` and keeps the block tables of every step.

# %%
random = np.random.default_rng(3)
num_requests, rows, page_size, longest = 24, 8, 8, 96
prompt_lengths = np.clip(random.lognormal(2.2, 0.7, num_requests), 2, 32).astype(int)
limits = np.clip(random.lognormal(2.8, 0.7, num_requests), 2, 64).astype(int)
prompts = [list(random.integers(0, 64, n)) for n in prompt_lengths]
recording = viz.record(
    model,
    prompts,
    max_new_tokens=64,
    token_limits=limits,
    max_seqs=rows,
    page_size=page_size,
    num_pages=rows * 12 + 1,
)
viz.timeline(recording, max_frames=16)

# %% [markdown]
# Three allocators replay the same trace, step by step, in slots (room for one token):
#
# - **paged**: as recorded;
# - **contiguous, reserved**: a row has room for the longest sequence allowed, as most decoders have it;
# - **contiguous, exact**: an oracle tells each request's final length and it takes the first hole that fits. Holes between
#   requests are what is left of fragmentation; the memory it needs is the highest address in use.


# %%
def replay(frames):
    """Slots with tokens, and slots taken by each allocator, at every step."""
    out, extents = {"tokens": [], "paged": [], "reserved": [], "exact": []}, {}
    for frame in frames:
        live = [r for r in frame.requests.tolist() if r >= 0]
        extents = {r: e for r, e in extents.items() if r in live}
        for r in live:
            if r not in extents:
                size, begin = int(prompt_lengths[r] + limits[r]), 0
                for a, b in sorted(extents.values()):
                    if a - begin >= size:
                        break
                    begin = max(begin, b)
                extents[r] = (begin, begin + size)
        out["tokens"].append(int(frame.cache.lengths.sum()))
        out["paged"].append(int((frame.cache.ref_counts > 0).sum()) * page_size)
        out["reserved"].append(rows * longest)
        out["exact"].append(max((b for _, b in extents.values()), default=0))
    return {name: np.array(values) for name, values in out.items()}


slots = replay(recording.frames)
busy = slots["tokens"] > 0
names = ("reserved", "exact", "paged")
waste = {name: 1 - slots["tokens"][busy].sum() / slots[name][busy].sum() for name in names}

figure, axis = plt.subplots(figsize=(7, 3.2))
for name in names:
    axis.plot(slots[name], label=f"{name}: {waste[name]:.0%} empty")
axis.fill_between(range(len(busy)), slots["tokens"], alpha=0.3, label="tokens")
axis.set(xlabel="step", ylabel="slots")
axis.legend(loc=(0.72, 0.57), fontsize=8)
figure.tight_layout()
plt.show()
for name in names:
    print(f"{name:9} peak {slots[name].max():4} slots, {waste[name]:.0%} of its slots empty on average")
assert waste["paged"] < waste["exact"] < waste["reserved"]

# %% [markdown]
# Pages waste less than even the allocator that knows the future. The same at the fullest moment, side by side:

# %%
viz.compare(recording)

# %% [markdown]
# ## How large is a page?
#
# Small pages waste less and need longer tables and more lookups. Waste as `generate` reports it, for the same requests:

# %%
sizes = (4, 16, 64)
measured = [
    float(jaxkv.generate(model, prompts, max_new_tokens=64, token_limits=limits, max_seqs=rows, page_size=size).stats.waste)
    for size in sizes
]
for size, share in zip(sizes, measured):
    print(f"pages of {size:2} tokens: {share:.0%} of their slots empty")
assert measured == sorted(measured)

# %% [markdown]
# Next: [03_generate_inside_jit](03_generate_inside_jit.ipynb).
