"""`score` against the plain model, its gradients, and the log-probabilities `generate` reports. Bits: `test_deterministic.py`."""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling

BATCH, SEQ = 3, 16
LENGTHS = [16, 1, 9]


def plain_logprobs(model: jaxkv.Decoder, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """log p of every token, by the book."""
    everything = jax.nn.log_softmax(model(tokens))
    chosen = jnp.take_along_axis(everything[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    chosen = jnp.pad(chosen, ((0, 0), (1, 0)))
    return chosen if lengths is None else jnp.where(jnp.arange(tokens.shape[1])[None] < lengths[:, None], chosen, 0.0)


@pytest.mark.parametrize("architecture", sorted(decoders.ARCHITECTURES))
def test_equals_log_softmax_of_the_model(architecture: str):
    model, tokens = decoders.decoder(architecture), decoders.random_tokens(0, BATCH, SEQ)
    got = jaxkv.score(model, tokens, jnp.asarray(LENGTHS))
    np.testing.assert_allclose(got, jax.jit(plain_logprobs)(model, tokens, jnp.asarray(LENGTHS)), atol=2e-5)
    assert got.dtype == jnp.float32
    assert not got[:, 0].any()
    assert not got[1].any()


@pytest.mark.parametrize("seq", [2, 3, 17, 65])
def test_one_row_in_deterministic_mode(seq: int):
    """Old fault: NaN with jaxlib 0.10.2 for one row of up to 64 tokens, whose lengths and block tables are constants of the program."""
    model, tokens = decoders.decoder(), decoders.random_tokens(2, 1, seq)
    got = jaxkv.score(model, tokens, deterministic=True)
    np.testing.assert_allclose(got, jax.jit(plain_logprobs)(model, tokens), atol=2e-5)


def test_padding_does_not_matter():
    model, tokens = decoders.decoder(), decoders.random_tokens(1, BATCH, SEQ)
    lengths = jnp.asarray(LENGTHS)
    want = jaxkv.score(model, tokens, lengths)
    for filler in (-1, 999):
        padded = jnp.where(jnp.arange(SEQ)[None] < lengths[:, None], tokens, filler)
        np.testing.assert_array_equal(jaxkv.score(model, padded, lengths), want)


def test_more_positions_than_one_block_of_logits(monkeypatch: pytest.MonkeyPatch):
    model, tokens = decoders.decoder(), decoders.random_tokens(2, 5, 120)  # 600 positions, blocks of 256
    np.testing.assert_allclose(jaxkv.score(model, tokens), jax.jit(plain_logprobs)(model, tokens), atol=2e-5)


class TestGradients:
    @staticmethod
    def gradients(function: Any, model: jaxkv.Decoder, tokens: jax.Array) -> list[np.ndarray]:
        weights = jax.random.normal(jax.random.key(0), (BATCH, SEQ))
        loss = lambda m: jnp.sum(function(m, tokens) * weights)
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(model))]

    @pytest.mark.parametrize(
        ("architecture", "options"),
        [
            ("gqa", {}),
            ("sandwich", {"remat": True}),  # old fault: two rope bases, and checkpoint could not sort them
            ("sandwich", {"deterministic": True}),
            pytest.param("sandwich", {"deterministic": True, "remat": True}, marks=pytest.mark.slow),
            pytest.param("learned", {"deterministic": True, "remat": True}, marks=pytest.mark.slow),
        ],
    )
    def test_equal_those_of_the_plain_model(self, architecture: str, options: dict[str, bool]):
        model, tokens = decoders.decoder(architecture), decoders.random_tokens(3, BATCH, SEQ)
        got = self.gradients(lambda m, t: jaxkv.score(m, t, jnp.asarray(LENGTHS), **options), model, tokens)
        want = self.gradients(lambda m, t: plain_logprobs(m, t, jnp.asarray(LENGTHS)), model, tokens)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, atol=2e-5 * max(1.0, np.abs(w).max()))
        assert sum(np.abs(g).max() > 0 for g in got) == len(got)

    def test_equal_finite_differences(self):
        model, tokens = decoders.decoder("mqa"), decoders.random_tokens(4, BATCH, SEQ)
        value = jax.jit(lambda m: jaxkv.score(m, tokens).mean())
        grads = jax.tree.leaves(jax.jit(jax.grad(value))(model))
        leaves, tree = jax.tree.flatten(model)
        directions = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)]
        norm = jnp.sqrt(sum(jnp.vdot(d, d) for d in directions))
        for scale in (3e-2, 1e-2):
            moved = [jax.tree.unflatten(tree, [x + s * d / norm for x, d in zip(leaves, directions)]) for s in (scale, -scale)]
            numeric = (value(moved[0]) - value(moved[1])) / (2 * scale)
            exact = sum(jnp.vdot(g, d) for g, d in zip(grads, directions)) / norm
            np.testing.assert_allclose(numeric, exact, rtol=0.02, atol=2e-4)


class TestAgainstGenerate:
    @pytest.mark.parametrize(
        "values", [{"temperature": 1.5}, {"temperature": 0.7, "top_k": 12}, {"temperature": 2.0, "top_p": 0.8, "min_p": 0.05}]
    )
    def test_both_distributions(self, values: dict[str, float]):
        model, lengths = decoders.decoder(), [1, 6, 4, 7]
        prompts, sampling = decoders.random_prompts(5, lengths), Sampling(**values)
        out = jaxkv.generate(model, prompts, max_new_tokens=9, sampling=sampling, key=jax.random.key(1))
        texts = [p + t for p, t in zip(prompts, out.tokens[:, 0].tolist(), strict=True)]
        padded = jnp.asarray([t + [0] * (SEQ - len(t)) for t in texts], jnp.int32)
        total = jnp.asarray([len(t) for t in texts])
        own, sampled = jaxkv.score(model, padded, total), jaxkv.score(model, padded, total, sampling=sampling)
        for i, n in enumerate(lengths):
            np.testing.assert_allclose(own[i, n : n + 9], out.logprobs[i, 0], atol=5e-5)
            np.testing.assert_allclose(sampled[i, n : n + 9], out.sampled_logprobs[i, 0], atol=1e-4)

    def test_a_token_that_is_filtered_out_is_impossible(self):
        model, tokens = decoders.decoder(), decoders.random_tokens(6, BATCH, SEQ)
        got = jaxkv.score(model, tokens, sampling=Sampling(temperature=1.0, top_k=1))
        best = decoders.plain_logits(model, tokens)[:, :-1].argmax(-1) == np.asarray(tokens)[:, 1:]
        np.testing.assert_array_equal(got[:, 1:], np.where(best, 0.0, -np.inf))


def test_inside_jit_with_traced_lengths_compiles_once():
    model = decoders.decoder()
    run = jax.jit(lambda m, t, n: jaxkv.score(m, t, n))
    for seed in range(3):
        tokens, lengths = decoders.random_tokens(seed, BATCH, SEQ), jnp.asarray([seed + 1, 16, 4])
        np.testing.assert_allclose(run(model, tokens, lengths), jaxkv.score(model, tokens, lengths), atol=1e-5)
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((1, 129), None, r"tokens: 129 are more than the model allows \(128\)"),
        ((0, 3), None, r"tokens are empty \(shape \[0, 3\]\): every row needs at least one token"),
        ((3, 0), None, "every row needs at least one token"),
        ((2, 3), [3, 4], r"lengths\[1\] is 4, but must be 1 to 3"),
        ((2, 3), [0, 3], r"lengths\[0\] is 0, but must be 1 to 3"),
    ],
)
def test_bad_input_is_named(shape: tuple[int, int], lengths: list[int] | None, message: str):
    given = None if lengths is None else jnp.asarray(lengths)
    with pytest.raises(ValueError, match=message):
        jaxkv.score(decoders.decoder(), jnp.zeros(shape, jnp.int32), given)


def test_tokens_outside_the_vocabulary_are_named():
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary"):
        jaxkv.score(decoders.decoder(), jnp.asarray([[1, 61]], jnp.int32))
