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
# # Train and roll out with the same parameters
#
# In RL the trainer's weights usually get copied into a second framework to generate, whose log-probabilities then differ a little from
# the trainer's. Here both are one `flax.nnx` module: optax trains it, `generate` rolls it out, inside the same jitted step. And in
# deterministic mode the log-probabilities agree to the last bit, so that importance ratios start at exactly 1.

# %%
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkv

root = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "docs" / "examples").is_dir())
sys.path.insert(0, str(root / "docs" / "examples"))
import grpo

# %% [markdown]
# ## Supervised training with optax
#
# A decoder of two layers and 28 letters learns a rhyme by heart. `model(tokens)` gives the logits of whole sequences, differentiable;
# `jaxkv.score` the log-probabilities of given tokens.

# %%
rhyme = "a page is a place for the keys that a token will seek. "
ids = jnp.array([grpo.LETTERS.index(letter) for letter in rhyme])
policy = grpo.new_policy()
optimizer = optax.adamw(3e-3)
state = optimizer.init(policy)


@jax.jit
def supervised_step(policy, state):
    def loss(policy):
        return -jnp.mean(jaxkv.score(policy, ids[None])[:, 1:])

    value, gradient = jax.value_and_grad(loss)(policy)
    updates, state = optimizer.update(gradient, state, policy)
    return optax.apply_updates(policy, updates), state, value


losses = []
for _ in range(150):
    policy, state, value = supervised_step(policy, state)
    losses.append(float(value))
out = jaxkv.generate(policy, [ids[:8].tolist()], max_new_tokens=len(rhyme) - 8)
written = "".join(grpo.LETTERS[t] for t in out.tokens[0, 0])
print(f"{losses[0]:.2f} -> {losses[-1]:.3f} nats a letter;", rhyme[:8] + "|" + written)
assert written == rhyme[8:]

# %% [markdown]
# ## Rollout and trainer: how far apart are they?
#
# `jaxkv.mismatch` compares the log-probabilities that `generate` reported with those of `score`. The two run different programs: one
# token at a time through pages, and all at once without a cache.

# %%
fresh = grpo.new_policy(1)
prompts = jax.random.randint(jax.random.key(2), (8, 6), 0, len(grpo.LETTERS))
rolled, apart = {}, {}
for exact in (False, True):
    rolled[exact] = jaxkv.generate(
        fresh,
        prompts,
        max_new_tokens=16,
        num_samples=8,
        sampling=jaxkv.Sampling(temperature=1.0),
        key=jax.random.key(3),
        deterministic=exact,
    )
    apart[exact] = jaxkv.mismatch(fresh, prompts, None, rolled[exact], deterministic=exact)
    print(f"deterministic={exact}: largest difference {float(apart[exact].max_difference):.2e} nats, "
          f"effective sample size {float(apart[exact].effective_sample_size):.6f}")  # fmt: skip
assert float(apart[True].max_difference) == 0.0

# %% [markdown]
# Not small: zero. Every ratio is therefore `exp(0) == 1.0`:

# %%
rows = jaxkv.sequences(prompts, None, rolled[True])
ratio = jnp.exp(jaxkv.score(fresh, rows.tokens, rows.lengths, deterministic=True) - rows.logprobs)
assert bool(jnp.all(ratio[rows.new] == 1.0))
print(int(rows.new.sum()), "tokens, all with ratio", np.unique(ratio[rows.new]))

# %% [markdown]
# ## GRPO in one jitted step
#
# `docs/examples/grpo.py`: eight samples for each of eight prompts, ranked within their prompt, two clipped policy-gradient steps. The
# reward is the share of vowels. Rollout, reward and training are one compiled program.

# %%
_, reports = grpo.train(steps=40)
reward = [float(r.reward) for r in reports]
off_one = np.array([np.asarray(r.off_one) for r in reports])

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
left.plot(reward)
left.set(xlabel="step", ylabel="mean reward", title="share of vowels")
right.plot(off_one[:, 0], "o", markersize=3, label="first inner step")
right.plot(off_one[:, 1], "s", markersize=3, label="second inner step")
right.set(xlabel="step", ylabel="largest |ratio - 1|")
right.legend(fontsize=8)
figure.tight_layout()
plt.show()

assert (off_one[:, 0] == 0.0).all(), "on policy, the ratio is exactly one"
assert (off_one[:, 1] > 0.0).all(), "and after an update it is not"
assert np.mean(reward[-5:]) > np.mean(reward[:5]) + 0.2
print(
    f"reward {np.mean(reward[:5]):.2f} -> {np.mean(reward[-5:]):.2f}; first inner step's ratios are 1.0 in all {len(reports)} steps"
)

# %% [markdown]
# Next: [05_kernels](05_kernels.ipynb).
