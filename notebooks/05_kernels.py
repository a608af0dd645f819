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
# # The kernels
#
# `pallas_kernels` has paged attention as an operation of its own: it takes a query, pages and block tables, and imports nothing but
# jax. Behind it stand plain XLA, which is the oracle, and Pallas kernels for GPUs. On a CPU a kernel runs in *interpret mode*: slow, and
# the same arithmetic. What interpret mode cannot show, registers, spills and shared memory, a compile report does; and what neither
# shows is time.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from pallas_kernels import paged_attention
from pallas_kernels.tools import compile_report
from pallas_kernels.tools.targets import TARGETS

# %% [markdown]
# ## The operation
#
# Four rows of different lengths, 8 query heads, 2 key/value heads, pages of 16 tokens in no particular order.

# %%
random = np.random.default_rng(0)
rows, heads, kv_heads, head_dim, page_size, width = 4, 8, 2, 64, 16, 6
num_pages = rows * width + 1
lengths = jnp.array([96, 1, 17, 50])
order = random.permutation(np.arange(1, num_pages)).reshape(rows, width).astype(np.int32)
held = np.arange(width)[None, :] < -(-np.asarray(lengths)[:, None] // page_size)
tables = jnp.asarray(np.where(held, order, 0))
q = jnp.asarray(random.normal(size=(rows, heads, head_dim)), jnp.float32)
k, v = (jnp.asarray(random.normal(size=(num_pages, kv_heads, page_size, head_dim)), jnp.float32) for _ in range(2))


def oracle(row):
    """Attention of one row in float64, its pages put one behind the other."""
    n = int(lengths[row])
    keys, values = (np.concatenate(np.asarray(x, np.float64)[np.asarray(tables[row])], axis=1)[:, :n] for x in (k, v))
    out = []
    for head in range(heads):
        scores = keys[head // (heads // kv_heads)] @ np.asarray(q[row, head], np.float64) / head_dim**0.5
        p = np.exp(scores - scores.max())
        out.append(p @ values[head // (heads // kv_heads)] / p.sum())
    return np.stack(out)


expected = np.stack([oracle(row) for row in range(rows)])
errors = {}
for name in ("xla", "triton_interpret"):
    out = paged_attention(q, k, v, tables, lengths, implementation=name)
    errors[name] = float(np.abs(np.asarray(out) - expected).max())
    print(f"{name:17} largest error {errors[name]:.1e}")
assert max(errors.values()) < 1e-5

# %% [markdown]
# ## Dead slots do not matter
#
# Behind a row's length anything may stand, NaN included: `0 * NaN` is NaN, so values are masked as well as scores.

# %%
poison = np.ones((num_pages, page_size), bool)
for row in range(rows):
    for i, page in enumerate(np.asarray(tables[row])[held[row]]):
        poison[page, : max(0, min(page_size, int(lengths[row]) - i * page_size))] = False
bad_k, bad_v = (jnp.where(jnp.asarray(poison)[:, None, :, None], jnp.nan, x) for x in (k, v))
for name in ("xla", "triton_interpret"):
    out = paged_attention(q, bad_k, bad_v, tables, lengths, implementation=name)
    assert np.abs(np.asarray(out) - expected).max() < 1e-5
print(f"{int(poison.sum())} of {poison.size} slots are NaN, and the results are as before")

# %% [markdown]
# A kernel that is asked for by name and cannot run says so; nothing falls back silently:

# %%
try:
    paged_attention(q, k, v, tables, lengths, implementation="triton")
except NotImplementedError as error:
    print(error)
else:
    assert jax.default_backend() == "gpu"

# %% [markdown]
# ## What the compiler says
#
# XLA compiles for a GPU on a machine without one when the CUDA plugin of jax's version is installed
# (`pip install 'jaxkv[gpu-compile]'`). The report says "compiles for", never "runs on".

# %%
reason = compile_report.missing_tools()
if reason:
    print("no report here:", reason)
else:
    cases = [compile_report.CompileCase(arch=arch, tokens=1024) for arch in TARGETS]
    for found in compile_report.compile_cases(cases, timeout=300):
        assert "error" not in found, found
        for kernel in found["kernels"]:
            if "paged" in kernel["name"]:
                print(f"{found['case'].arch:8} {kernel['name'][:40]:40} {kernel['registers']:3} registers, "
                      f"{kernel['spill_bytes']} bytes spilled, {kernel['shared_bytes']} bytes of shared memory")  # fmt: skip
                assert kernel["spill_bytes"] == 0

# %% [markdown]
# ## Roofline
#
# Decode attention reads every key and value once and does four operations per query head and element: two for $q \cdot k$, two for
# $p \cdot v$. Its intensity is therefore $4 \cdot q\_per\_kv \cdot queries / (2 \cdot bytes)$ operations a byte, no matter how long the
# sequence. A GPU needs its ridge, peak operations over bandwidth, to be busy computing.


# %%
def intensity(q_per_kv, queries=1, itemsize=2):
    """Operations a byte of pages read."""
    return 4 * q_per_kv * queries / (2 * itemsize)


figure, axis = plt.subplots(figsize=(7, 3.6))
xs = np.logspace(-0.5, 4, 100)
for arch, target in TARGETS.items():
    axis.loglog(xs, np.minimum(target.bf16_flops, xs * target.bandwidth) / 1e12, label=f"{target.kind} ({arch})")
for words, x in (("MHA", intensity(1)), ("GQA 4", intensity(4)), ("GQA 8", intensity(8)), ("prefill 256", intensity(4, 256))):
    axis.axvline(x, color="grey", linewidth=0.7)
    axis.annotate(words, (x, 0.7), rotation=90, fontsize=8, ha="right", va="bottom")
axis.set(xlabel="operations a byte", ylabel="attainable TFLOP/s", title="bfloat16, from the data sheets")
axis.legend(fontsize=8)
figure.tight_layout()
plt.show()

for arch, target in TARGETS.items():
    ridge = target.bf16_flops / target.bandwidth
    page_bytes = 2 * 8 * 128 * 2 * 32 * 4096  # K and V, 8 kv heads of 128, bfloat16, 32 rows of 4,096 tokens, one layer
    print(f"{arch:8} ridge at {ridge:.0f} operations a byte; decode of 32 x 4,096 tokens takes at least "
          f"{page_bytes / target.bandwidth * 1e6:.0f} us a layer")  # fmt: skip
    assert intensity(8) < ridge < intensity(4, 256)

# %% [markdown]
# So decode is bound by memory on every GPU here, by a factor of ten and more: what counts is to read each page once, in wide copies, and
# nothing that is dead. And it is why a chunk of prefill can ride along in a decode step almost free of charge.
