"""Sampling: filters against transformers' own, draws against the exact distribution."""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

import jaxkv
from jaxkv import Sampling
from jaxkv.decode.sampling import filtered_logits, sample, token_logprobs

VOCAB = 40


def some_logits(seed: int, rows: int = 6, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab), scale=2.0).astype(np.float32)


_filtered = jax.jit(filtered_logits)
_sample = jax.jit(sample)


def filtered(logits: np.ndarray, **values: Any) -> np.ndarray:
    return np.asarray(_filtered(jnp.asarray(logits), Sampling(**values).per_row(len(logits))))


def kept(logits: np.ndarray, **values: Any) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in filtered(logits, **{"temperature": 1.0, **values})]


@pytest.mark.torch
class TestAgainstTransformers:
    @staticmethod
    def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
        import torch
        from transformers.generation import logits_process as lp

        warpers = [lp.TemperatureLogitsWarper(temperature)]
        if top_k:
            warpers.append(lp.TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(lp.TopPLogitsWarper(top_p))
        if min_p:
            warpers.append(lp.MinPLogitsWarper(min_p))
        scores = torch.from_numpy(logits.copy())
        for warper in warpers:
            scores = warper(None, scores)
        return scores.numpy()

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
    @pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB - 1, VOCAB])
    @pytest.mark.parametrize("top_p", [1e-6, 0.35, 0.9, 0.999, 1.0])
    @pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
    def test_every_combination(self, temperature: float, top_k: int, top_p: float, min_p: float):
        values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for seed in (0, 1):
            logits = some_logits(seed)
            ours, theirs = filtered(logits, **values), self.warped(logits, **values)
            np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)

    @pytest.mark.parametrize("top_k", [1, 3, 4, 7])
    def test_ties_at_the_kth_all_stay(self, top_k: int):
        logits = np.round(some_logits(2) * 0.7).astype(np.float32)  # many equal values
        values = {"temperature": 1.0, "top_k": top_k, "top_p": 1.0, "min_p": 0.1}
        np.testing.assert_array_equal(filtered(logits, **values), self.warped(logits, **values))

    def test_a_large_vocabulary(self):
        logits = some_logits(3, rows=2, vocab=50_000)
        values = {"temperature": 0.8, "top_k": 500, "top_p": 0.9, "min_p": 1e-4}
        ours, theirs = filtered(logits, **values), self.warped(logits, **values)
        assert np.sum(np.isfinite(ours) != np.isfinite(theirs)) <= 2  # sums of 50,000 float32 numbers in two orders


class TestFilters:
    def test_top_p_keeps_the_fewest_that_reach_it(self):
        logits = np.log(np.array([[0.1, 0.5, 0.25, 0.15]], np.float32))
        expected = {0.01: [1], 0.49: [1], 0.51: [1, 2], 0.74: [1, 2], 0.76: [1, 2, 3], 0.91: [0, 1, 2, 3], 1.0: [0, 1, 2, 3]}
        for top_p, tokens in expected.items():
            assert kept(logits, top_p=top_p) == [tokens], top_p

    def test_top_p_keeps_ties_together(self):
        logits = np.zeros((1, 4), np.float32)
        assert kept(logits, top_p=0.3) == [[0, 1, 2, 3]]

    def test_top_p_works_on_what_top_k_left(self):
        logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
        assert kept(logits, top_p=0.55) == [[0, 1]]
        assert kept(logits, top_k=2, top_p=0.55) == [[0]]  # 0.4 of 0.7 is 0.57

    def test_min_p_is_relative_to_the_best(self):
        logits = np.log(np.array([[0.5, 0.26, 0.24]], np.float32))
        assert kept(logits, min_p=0.5) == [[0, 1]]

    @pytest.mark.parametrize(
        "values", [{"top_k": 3}, {"top_p": 1e-7}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5, "min_p": 0.5}, {}]
    )
    def test_the_best_token_always_stays(self, values: dict[str, float]):
        logits = some_logits(4)
        for row, tokens in zip(logits, kept(logits, **values), strict=True):
            assert int(np.argmax(row)) in tokens

    def test_negative_zero_is_zero(self):
        assert kept(np.array([[0.0, -0.0, -1.0]], np.float32), top_k=1) == [[0, 1]]

    def test_tokens_that_are_impossible_stay_so(self):
        logits = np.array([[0.0, -np.inf, 1.0, -np.inf]], np.float32)
        for values in ({}, {"top_k": 3}, {"top_k": 9, "top_p": 0.9999}, {"min_p": 1e-9}):
            assert kept(logits, **values) == [[0, 2]]

    def test_a_row_does_not_see_its_mates(self):
        logits = some_logits(5)
        values = {
            "temperature": [0.5, 1.0, 0.0, 2.0, 1.0, 1.0],
            "top_k": [0, 3, 0, 7, 0, 40],
            "top_p": [1, 1, 0.5, 0.8, 0.3, 1],
        }
        together = filtered(logits, **{k: jnp.asarray(v) for k, v in values.items()})
        for i in range(6):
            alone = filtered(logits[i : i + 1], **{k: v[i] for k, v in values.items()})
            np.testing.assert_array_equal(together[i], alone[0])

    def test_greedy_rows_keep_their_best_tokens_only(self):
        logits = np.array([[1.0, 3.0, 2.0, 3.0]], np.float32)
        assert kept(logits, temperature=0.0, top_k=3, top_p=0.9) == [[1, 3]]


class TestSample:
    KEYS = 20_000

    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"temperature": 2.5},
            {"temperature": 0.5, "top_k": 5},
            {"top_p": 0.8},
            {"min_p": 0.2},
            {"temperature": 1.7, "top_k": 9, "top_p": 0.95},
        ],
    )
    def test_draws_follow_the_exact_distribution(self, values: dict[str, float]):
        logits = some_logits(6, rows=1, vocab=12)[0] * 0.5
        values = {"temperature": 1.0, **values}
        row = np.float64(filtered(logits[None], **values)[0])
        exact = np.exp(row - row.max())
        exact /= exact.sum()
        keys = jax.random.split(jax.random.key(7), self.KEYS)
        many = jnp.broadcast_to(jnp.asarray(logits), (self.KEYS, 12))
        tokens, logprobs = _sample(many, Sampling(**values).per_row(self.KEYS), keys)
        counts = np.bincount(np.asarray(tokens), minlength=12)
        assert counts[exact == 0].sum() == 0
        seen = exact > 0
        assert stats.chisquare(counts[seen], self.KEYS * exact[seen]).pvalue > 1e-3
        np.testing.assert_allclose(np.asarray(logprobs), np.log(exact[np.asarray(tokens)]), atol=1e-5)

    def test_greedy_is_argmax(self):
        logits = some_logits(8)
        keys = jax.random.split(jax.random.key(0), 6)
        tokens, logprobs = _sample(jnp.asarray(logits), Sampling(top_k=3, top_p=0.5).per_row(6), keys)
        alone, _ = _sample(jnp.asarray(logits), Sampling().per_row(6), None)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
        np.testing.assert_array_equal(alone, logits.argmax(-1))
        assert not logprobs.any()

    @pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 1024, 1500])
    def test_rows_of_any_length(self, vocab: int):
        """Reduced in blocks of 512: the first of equals, in one block and in several, and every kind of padding."""
        logits = np.random.default_rng(vocab).normal(size=(6, vocab)).astype(np.float32)
        logits[1] = 7.0
        logits[2, [vocab // 3, vocab // 2, vocab - 1]] = 9.0
        logits[3, -1] = 9.0
        logits[4, : vocab - 1] = -np.inf
        logits[5] -= 100.0
        tokens, _ = _sample(jnp.asarray(logits), Sampling().per_row(6), None)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
        want = logits.max(-1) - special.logsumexp(logits.astype(np.float64), axis=-1)
        np.testing.assert_allclose(token_logprobs(jnp.asarray(logits), tokens), want, rtol=1e-6, atol=2e-5)

    def test_greedy_and_sampled_rows_mix(self):
        logits = jnp.asarray(some_logits(9))
        keys = jax.random.split(jax.random.key(1), 6)
        mixed, _ = _sample(logits, Sampling(temperature=jnp.asarray([0.0, 3.0] * 3)).per_row(6), keys)
        hot, _ = _sample(logits, Sampling(temperature=3.0).per_row(6), keys)
        cold, _ = _sample(logits, Sampling().per_row(6), None)
        np.testing.assert_array_equal(mixed, np.where(np.arange(6) % 2 == 0, cold, hot))

    def test_a_draw_depends_on_its_own_key_alone(self):
        logits = jnp.asarray(some_logits(10))
        keys = jax.random.split(jax.random.key(2), 6)
        values = Sampling(temperature=2.0, top_p=0.9)
        together, _ = _sample(logits, values.per_row(6), keys)
        order = np.array([3, 5, 0, 1, 4, 2])
        moved, _ = _sample(logits[order], values.per_row(6), keys[order])
        np.testing.assert_array_equal(moved, np.asarray(together)[order])
        for i in range(6):
            alone, _ = _sample(logits[i : i + 1], values.per_row(1), keys[i : i + 1])
            assert int(alone[0]) == int(together[i])

    def test_another_key_gives_another_draw(self):
        logits = jnp.zeros((1, 1000))
        draws = {int(_sample(logits, Sampling(1.0).per_row(1), jax.random.key(s)[None])[0][0]) for s in range(10)}
        assert len(draws) > 5

    def test_traced_values_give_the_same(self):
        logits = jnp.asarray(some_logits(11))
        keys = jax.random.split(jax.random.key(3), 6)

        @jax.jit
        def traced(temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
            return _sample(logits, Sampling(temperature, top_k, top_p, min_p).per_row(6), keys)[0]

        for values in ((1.5, 0, 1.0, 0.0), (1.5, 4, 0.7, 0.1), (0.0, 0, 0.5, 0.0)):
            known, _ = _sample(logits, Sampling(*values).per_row(6), keys)
            given = [jnp.asarray(v, jnp.int32 if i == 1 else jnp.float32) for i, v in enumerate(values)]
            np.testing.assert_array_equal(traced(*given), known)
        assert traced._cache_size() == 1


class TestValues:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"temperature": -0.1}, "temperature must be >= 0 and finite, got -0.1"),
            ({"temperature": float("inf")}, "temperature must be .* got inf"),
            ({"temperature": float("nan")}, "temperature must be .* got nan"),
            ({"top_k": -1}, "top_k must be an integer >= 0 .* got -1"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
            ({"top_p": 1.01}, "top_p must be .* got 1.01"),
            ({"min_p": -0.01}, r"min_p must be in \[0, 1\], got -0.01"),
            ({"min_p": 1.5}, "min_p must be .* got 1.5"),
            ({"temperature": jnp.asarray([1.0, -2.0])}, r"temperature must be .* got \[ 1. -2.\]"),
            ({"temperature": True}, "temperature must be"),
        ],
    )
    def test_impossible_ones_are_named(self, values: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            Sampling(**values)

    @pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
    def test_a_wrong_number_of_them_is_named(self, name: str):
        with pytest.raises(ValueError, match=rf"{name} must be one value or one per prompt \(3\), got shape \(2,\)"):
            Sampling(**{name: jnp.ones(2)}).per_row(3)

    def test_it_is_a_pytree(self):
        values = Sampling(temperature=jnp.asarray([0.0, 1.0])).per_row(2)
        assert jax.tree.structure(values).num_leaves == 4
        assert values.at(jnp.asarray([1, 1, 0])).temperature.tolist() == [1.0, 1.0, 0.0]
        jax.vmap(lambda s: s.temperature + s.top_p)(values)

    def test_known_to_be_greedy(self):
        assert Sampling().always_greedy
        assert Sampling(top_k=4).always_greedy
        assert not Sampling(temperature=jnp.asarray([0.0, 0.1])).always_greedy
        assert not jax.jit(lambda t: jnp.asarray(Sampling(t).always_greedy))(0.0)


def test_token_logprobs_are_log_softmax():
    logits = jnp.asarray(some_logits(12))
    tokens = decoders.random_tokens(0, 6) % VOCAB
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(token_logprobs(logits, tokens), expected, atol=1e-6)
    far = token_logprobs(jnp.asarray([[1e4, -1e4, 0.0]]), jnp.asarray([1]))
    assert far.tolist() == [-2e4]
    assert jaxkv.sample is sample
