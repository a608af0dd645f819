"""GRPO on one set of parameters: rollouts by `jaxkv.generate`, training by optax, one jitted step, importance ratios of exactly 1.

A small random decoder writes letters and is paid for the share of vowels. Every step rolls out eight samples per prompt, ranks
them within their prompt, and takes two clipped policy-gradient steps. In deterministic mode the trainer's log-probabilities are those
of the rollout to the last bit, so the first of the two sees a ratio of 1.0 everywhere: there is no mismatch to correct.

    python docs/examples/grpo.py
"""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxkv

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PROMPTS, WIDTH, SAMPLES, NEW, INNER, CLIP = 8, 6, 8, 16, 2, 0.2


class Report(NamedTuple):
    """Of one step: mean reward, and the largest |ratio - 1| on each inner step."""

    reward: jax.Array
    off_one: jax.Array


def new_policy(seed: int = 0) -> jaxkv.Decoder:
    """A random decoder of 28 letters."""
    config = jaxkv.ModelConfig(
        "llama", len(LETTERS), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128,
        max_seq_len=64, rope=jaxkv.Rope(rotary_dim=16), tie_embeddings=True,
    )  # fmt: skip
    return jaxkv.Decoder(config, rngs=nnx.Rngs(seed))


def reward_of(tokens: jax.Array, real: jax.Array) -> jax.Array:
    """Share of vowels among each row's real tokens."""
    vowel = jnp.asarray([letter in "aeiou" for letter in LETTERS])
    return jnp.sum(vowel[tokens] & real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)


def objective(policy: jaxkv.Decoder, rows: jaxkv.Sequences, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The clipped objective, negated, and how far the ratios are from one."""
    logprobs = jaxkv.score(policy, rows.tokens, rows.lengths, deterministic=True)
    ratio = jnp.exp(logprobs - rows.logprobs)
    gain = jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage[:, None])
    off_one = jnp.max(jnp.where(rows.new, jnp.abs(ratio - 1), 0.0))
    return -jnp.sum(jnp.where(rows.new, gain, 0.0)) / jnp.sum(rows.new), off_one


@functools.partial(jax.jit, static_argnums=(3,), donate_argnums=(0, 1))
def train_step(policy: jaxkv.Decoder, state: optax.OptState, key: jax.Array, optimizer: optax.GradientTransformation):
    """Roll out, reward, and train: one compiled program."""
    prompt_key, sample_key = jax.random.split(key)
    prompts = jax.random.randint(prompt_key, (PROMPTS, WIDTH), 0, len(LETTERS))
    out = jaxkv.generate(
        policy, prompts, max_new_tokens=NEW, num_samples=SAMPLES, sampling=jaxkv.Sampling(temperature=1.0), key=sample_key,
        deterministic=True,
    )  # fmt: skip
    rows = jaxkv.sequences(prompts, None, out)
    reward = reward_of(rows.tokens, rows.new).reshape(PROMPTS, SAMPLES)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    off_one = []
    for _ in range(INNER):
        (_, off), gradient = jax.value_and_grad(objective, has_aux=True)(policy, rows, advantage.reshape(-1))
        updates, state = optimizer.update(gradient, state, policy)
        policy = optax.apply_updates(policy, updates)
        off_one.append(off)
    return policy, state, Report(reward.mean(), jnp.stack(off_one))


def train(steps: int = 60, seed: int = 0) -> tuple[jaxkv.Decoder, list[Report]]:
    """Train a new policy; returns it and what happened at each step."""
    policy, optimizer = new_policy(seed), optax.adam(3e-3)
    state, key, reports = optimizer.init(policy), jax.random.key(seed), []
    for step in range(steps):
        policy, state, report = train_step(policy, state, jax.random.fold_in(key, step), optimizer)
        reports.append(jax.device_get(report))
    return policy, reports


def main() -> None:
    """Train, show the reward rise, save the policy and use the saved one."""
    policy, reports = train()
    for step in range(0, len(reports), 10):
        reward, off_one = reports[step]
        print(
            f"step {step:3d}  reward {reward:.3f}  |ratio - 1| on the first inner step {off_one[0]}, on the second {off_one[1]:.4f}"
        )
    print(f"last      reward {reports[-1].reward:.3f}")
    with TemporaryDirectory() as folder:
        jaxkv.save(policy, Path(folder) / "policy")
        again, _ = jaxkv.load(str(Path(folder) / "policy"))
    prompt = [[LETTERS.index(letter) for letter in "xyz"]]
    out = jaxkv.generate(again, prompt, max_new_tokens=NEW, sampling=jaxkv.Sampling(temperature=1.0), key=jax.random.key(1))
    print("the saved policy writes:", "".join(LETTERS[t] for t in out.tokens[0, 0]))


if __name__ == "__main__":
    main()
