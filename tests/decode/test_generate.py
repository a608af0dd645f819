"""`generate` and `stream`: against naive recomputation, inside the caller's jit, and what they refuse.

`test_continuous_batching.py` has many prompts through few rows and small pools.
"""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkv
from jaxkv import Sampling

NEW = 10
PROMPTS = decoders.random_prompts(0, [1, 5, 16, 3])


def real(out: jaxkv.GenerateOutput) -> list[list[list[int]]]:
    """Tokens without the padding, which is checked."""
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    padding = np.arange(tokens.shape[2]) >= lengths[..., None]
    assert ((tokens == -1) == padding).all()
    assert not np.asarray(out.logprobs)[padding].any()
    assert not np.asarray(out.sampled_logprobs)[padding].any()
    return [[row[:n].tolist() for row, n in zip(rows, ns, strict=True)] for rows, ns in zip(tokens, lengths, strict=True)]


class TestGreedy:
    @pytest.mark.parametrize(
        "architecture",
        [a if a in ("gqa", "learned", "sandwich") else pytest.param(a, marks=pytest.mark.slow) for a in decoders.ARCHITECTURES],
    )
    def test_equals_naive_recomputation(self, architecture: str):
        model = decoders.decoder(architecture)
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, page_size=3, max_seqs=3, prefill_chunk=7)
        got = real(out)
        assert got == [[decoders.naive_greedy(model, p, NEW)] for p in PROMPTS]
        assert not out.finished.any()
        assert len({t for rows in got for t in rows[0]}) > 6, "the tokens hardly vary: the test proves little"

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_page_sizes(self, page_size: int):
        model = decoders.decoder()
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, page_size=page_size)
        assert real(out) == [[decoders.naive_greedy(model, p, NEW)] for p in PROMPTS]

    def test_logprobs_are_the_models_own(self):
        model = decoders.decoder()
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW)
        for prompt, [tokens], logprobs in zip(PROMPTS, real(out), np.asarray(out.logprobs), strict=True):
            text = prompt + tokens
            padded = jnp.asarray([text + [0] * (32 - len(text))], jnp.int32)
            want = jax.nn.log_softmax(decoders.plain_logits(model, padded)[0])[len(prompt) - 1 : len(text) - 1]
            np.testing.assert_allclose(logprobs[0], np.asarray(want)[np.arange(NEW), tokens], atol=5e-5)
        assert not out.sampled_logprobs.any()

    def test_end_tokens_end_and_are_part_of_the_result(self):
        model = decoders.decoder()
        plain = [rows[0] for rows in real(jaxkv.generate(model, PROMPTS, max_new_tokens=NEW))]
        ends = [plain[0][3], plain[1][6]]
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=ends)
        for tokens, [got], [finished] in zip(plain, real(out), np.asarray(out.finished), strict=True):
            stop = min((tokens.index(e) + 1 for e in ends if e in tokens), default=NEW)
            assert got == tokens[:stop]
            assert finished == (got[-1] in ends)
        same = jaxkv.generate(model, [PROMPTS[2]] * 4, max_new_tokens=NEW, eos_token_id=[plain[2][2]] * 2)
        assert same.lengths.tolist() == [[plain[2].index(plain[2][2]) + 1]] * 4
        assert int(same.stats.steps) < NEW, "nothing is left to do, and yet there were steps"

    def test_none_is_the_models_own_end_and_the_empty_tuple_never(self):
        """Old fault: `generate` never ended unless told."""
        plain = [rows[0] for rows in real(jaxkv.generate(decoders.decoder(), PROMPTS, max_new_tokens=NEW))]
        ends = (plain[0][3], plain[1][6])
        model = decoders.with_ends(decoders.decoder(), ends)
        want = [[t[: min((t.index(e) + 1 for e in ends if e in t), default=NEW)]] for t in plain]
        assert want != [[t] for t in plain]
        assert real(jaxkv.generate(model, PROMPTS, max_new_tokens=NEW)) == want
        assert real(jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, eos_token_id=())) == [[t] for t in plain]
        naive, made = jaxkv.generate_naive(model, PROMPTS, max_new_tokens=NEW)
        assert [[row[:n]] for row, n in zip(naive.tolist(), made.tolist(), strict=True)] == want

    def test_token_limits_per_prompt(self):
        model, limits = decoders.decoder(), [1, 10, 4, 7]
        plain = real(jaxkv.generate(model, PROMPTS, max_new_tokens=NEW))
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, token_limits=jnp.asarray(limits))
        assert real(out) == [[rows[0][:n]] for rows, n in zip(plain, limits, strict=True)]
        assert int(out.stats.steps) <= NEW + len(PROMPTS)

    def test_padding_does_not_matter(self):
        model = decoders.decoder()
        width = max(map(len, PROMPTS))
        lengths = jnp.asarray([len(p) for p in PROMPTS])
        for filler in (0, 60, -1, 10**6):
            prompts = jnp.asarray([p + [filler] * (width - len(p)) for p in PROMPTS], jnp.int32)
            out = jaxkv.generate(model, prompts, lengths, max_new_tokens=NEW)
            assert real(out) == real(jaxkv.generate(model, PROMPTS, max_new_tokens=NEW))

    def test_stats_of_one_prompt(self):
        out = jaxkv.generate(decoders.decoder(), [PROMPTS[2]], max_new_tokens=NEW, page_size=4, prefill_chunk=8)
        assert int(out.stats.steps) == 2 + NEW - 1  # 16 tokens in chunks of 8, and the last token is never fed
        assert int(out.stats.preemptions) == 0
        assert int(out.stats.peak_pages) == -(-(16 + NEW - 1) // 4)
        assert 0 < float(out.stats.waste) < 0.25

    def test_narrow_cache(self):
        out = jaxkv.generate(decoders.decoder(), PROMPTS, max_new_tokens=NEW, cache_dtype="bfloat16")
        wide = jaxkv.generate(decoders.decoder(), PROMPTS, max_new_tokens=NEW)
        np.testing.assert_allclose(out.logprobs[:, :, 0], wide.logprobs[:, :, 0], atol=0.1)


class TestSampled:
    HOT = Sampling(temperature=1.5, top_k=30, top_p=0.95)

    def test_a_key_and_its_prompt_decide(self):
        model, key = decoders.decoder(), jax.random.key(1)
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=key)
        again = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=key)
        assert real(out) == real(again)
        other = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=jax.random.key(2))
        assert real(out) != real(other)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(4))
        given = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=keys)
        assert real(out) == real(given)

    def test_old_style_keys(self):
        model = decoders.decoder()
        new = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=jax.random.key(3))
        old = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=jax.random.PRNGKey(3))
        assert real(new) == real(old)

    def test_every_token_by_hand(self):
        """The documented rule: fold_in(fold_in(key_i, sample), position), the filters, a Gumbel draw."""
        model, key = decoders.decoder(), jax.random.key(4)
        out = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=self.HOT, key=key, num_samples=2)
        draw = jax.jit(jaxkv.sample)
        for i, (prompt, samples) in enumerate(zip(PROMPTS, real(out), strict=True)):
            for s, tokens in enumerate(samples):
                text = prompt + tokens
                logits = decoders.plain_logits(model, jnp.asarray([text + [0] * (32 - len(text))], jnp.int32))[0]
                row_key = jax.random.fold_in(jax.random.fold_in(key, i), s)
                position = jnp.arange(len(prompt), len(text))
                keys = jax.vmap(lambda p: jax.random.fold_in(row_key, p))(position)  # noqa: B023
                rows = jnp.asarray(logits[len(prompt) - 1 : len(text) - 1])
                want, logprobs = draw(rows, self.HOT.per_row(NEW), keys)
                assert tokens == want.tolist()
                np.testing.assert_allclose(out.sampled_logprobs[i, s], logprobs, atol=1e-4)

    def test_greedy_and_sampled_prompts_mix(self):
        model, key = decoders.decoder(), jax.random.key(5)
        mixed = jaxkv.generate(
            model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(temperature=jnp.asarray([0.0, 1.5, 0.0, 1.5])), key=key
        )
        cold = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW)
        hot = jaxkv.generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling(temperature=1.5), key=key)
        assert real(mixed) == [real((cold, hot)[i % 2])[i] for i in range(4)]

    def test_samples_of_a_prompt_differ(self):
        out = jaxkv.generate(
            decoders.decoder(), PROMPTS, max_new_tokens=NEW, sampling=Sampling(2.0), key=jax.random.key(6), num_samples=2
        )
        assert out.tokens.shape == (4, 2, NEW)
        assert all(len({tuple(s) for s in samples}) == 2 for samples in real(out))


class TestStream:
    @pytest.mark.parametrize("steps_per_turn", [1, 5])
    def test_yields_what_generate_returns(self, steps_per_turn: int):
        options: dict[str, Any] = dict(
            max_new_tokens=NEW, sampling=Sampling(1.5), key=jax.random.key(7), num_samples=2, max_seqs=3, page_size=4, num_pages=16,
            eos_token_id=[1, 2, 3, 4, 5, 6],
        )  # fmt: skip
        out = jaxkv.generate(decoders.decoder(), PROMPTS, **options)
        stream = jaxkv.stream(decoders.decoder(), PROMPTS, steps_per_turn=steps_per_turn, **options)
        got: dict[tuple[int, int], list[jaxkv.Token]] = {}
        order: list[tuple[int, int]] = []
        try:
            while True:
                token = next(stream)
                order.append((token.prompt, token.sample))
                got.setdefault((token.prompt, token.sample), []).append(token)
        except StopIteration as end:
            final = end.value
        jax.tree.map(np.testing.assert_array_equal, final, out)
        for (prompt, sample), tokens in got.items():
            assert [t.token for t in tokens] == real(out)[prompt][sample]
            assert [t.position for t in tokens] == [len(PROMPTS[prompt]) + i for i in range(len(tokens))]
            np.testing.assert_array_equal([t.logprob for t in tokens], out.logprobs[prompt, sample, : len(tokens)])
        assert len(got) == 8
        assert order != sorted(order), "rows take turns: tokens come as they are made"

    def test_bad_arguments_come_before_the_first_step(self):
        with pytest.raises(ValueError, match="page_size must be an integer >= 1, got 0"):
            jaxkv.stream(decoders.decoder(), PROMPTS, max_new_tokens=NEW, page_size=0)
        with pytest.raises(TypeError, match="'max_tokens'"):
            jaxkv.stream(decoders.decoder(), PROMPTS, max_new_tokens=NEW, max_tokens=3)
        with pytest.raises(TypeError, match="needs max_new_tokens"):
            jaxkv.stream(decoders.decoder(), PROMPTS)

    def test_on_token_hears_every_token_in_order(self):
        heard: dict[tuple[int, int], list[tuple[int, int]]] = {}

        def on_token(prompt: int, sample: int, position: int, token: int) -> None:
            heard.setdefault((prompt, sample), []).append((position, token))

        out = jaxkv.generate(
            decoders.decoder(), PROMPTS, max_new_tokens=NEW, max_seqs=2, num_pages=12, page_size=4, on_token=on_token
        )
        jax.effects_barrier()
        want = {(i, 0): [(len(p) + j, t) for j, t in enumerate(real(out)[i][0])] for i, p in enumerate(PROMPTS)}
        assert heard == want


class TestInsideJit:
    def test_rollout_and_training_step_compile_once(self):
        model, optimizer = decoders.decoder(), optax.sgd(1e-3)

        @jax.jit
        def iteration(
            model: jaxkv.Decoder, state: Any, prompts: jax.Array, lengths: jax.Array, temperature: jax.Array, key: jax.Array
        ) -> tuple[jaxkv.Decoder, Any, jaxkv.GenerateOutput]:
            out = jaxkv.generate(
                model,
                prompts,
                lengths,
                max_new_tokens=NEW,
                sampling=Sampling(temperature),
                key=key,
                eos_token_id=7,
                page_size=4,
            )

            def loss(model: jaxkv.Decoder) -> jax.Array:
                return -jaxkv.score(model, prompts, lengths).mean()

            updates, state = optimizer.update(jax.grad(loss)(model), state)
            return optax.apply_updates(model, updates), state, out

        state, tokens = optimizer.init(model), decoders.random_tokens(1, 4, 16)
        lengths = jnp.asarray([16, 1, 7, 4])
        new, state, out = iteration(model, state, tokens, lengths, jnp.float32(1.5), jax.random.key(0))
        prompts = [row[:n].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]
        outside = jaxkv.generate(
            model, prompts, max_new_tokens=NEW, sampling=Sampling(1.5), key=jax.random.key(0), eos_token_id=7, page_size=4
        )
        assert real(out) == real(outside)
        for i in range(3):
            arguments = (decoders.random_tokens(i, 4, 16), jnp.asarray([3 + i, 2, 16, 9]), jnp.float32(i), jax.random.key(i))
            new, state, out = iteration(new, state, *arguments)
        assert iteration._cache_size() == 1

    def test_greedy_with_traced_prompts(self):
        model = decoders.decoder()
        run = jax.jit(lambda m, p, n: jaxkv.generate(m, p, n, max_new_tokens=NEW, page_size=4))
        for seed in (0, 1):
            tokens = decoders.random_tokens(seed, 4, 16)
            out = run(model, tokens, jnp.asarray([16, 3, 9, 1]))
            assert real(out)[1] == [decoders.naive_greedy(model, tokens[1, :3].tolist(), NEW)]
        assert run._cache_size() == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([], {}, "prompts are empty"),
            ([[]], {}, "every prompt needs at least one token"),
            ([[1], []], {}, r"prompts\[1\] is empty: every prompt needs at least one token"),
            ([[1, 61]], {}, r"token id 61 is outside the vocabulary \(0 to 60\)"),
            ([[-1]], {}, "token id -1 is outside the vocabulary"),
            ([[1] * 100], {"max_new_tokens": 29}, "a prompt of 100 tokens and 29 new ones are 129, but the model allows 128"),
            ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
            ([[1]], {"page_size": 0}, "page_size must be an integer >= 1, got 0"),
            ([[1]], {"num_samples": 0}, "num_samples must be an integer >= 1, got 0"),
            ([[1]], {"max_seqs": 0}, "max_seqs must be an integer >= 1, got 0"),
            ([[1]], {"prefill_chunk": 0}, "prefill_chunk must be an integer >= 1, got 0"),
            (
                [[1] * 10],
                {"page_size": 4, "num_pages": 5},
                "num_pages is 5, but one sequence of 20 tokens .* needs 6 pages of 4 tokens",
            ),
            ([[1]], {"num_pages": 0}, "num_pages is 0, but one sequence of 11 tokens .* needs 2 pages"),
            ([[1]], {"sampling": Sampling(1.0)}, "sampling needs a key"),
            (
                [[1]],
                {"sampling": Sampling(jnp.ones(2)), "key": jax.random.key(0)},
                "temperature must be one value or one per prompt",
            ),
            (
                [[1]],
                {"sampling": Sampling(1.0), "key": jax.random.split(jax.random.key(0), 3)},
                r"one per prompt \(1\), got shape \[3\]",
            ),
            ([[1]], {"token_limits": jnp.asarray([11])}, r"token_limits\[0\] is 11, but must be 1 to max_new_tokens = 10"),
            ([[1], [2]], {"token_limits": jnp.asarray([3, 0])}, r"token_limits\[1\] is 0"),
            ([[1]], {"prompt_lengths": jnp.asarray([1])}, "prompt_lengths goes with an array of prompts"),
            (
                jnp.ones((2, 3), jnp.int32),
                {"prompt_lengths": jnp.asarray([3, 4])},
                r"prompt_lengths\[1\] is 4, but must be 1 to 3",
            ),
            ([[1]], {"implementation": "nothing"}, "nothing"),
            ([[1]], {"cache_dtype": "int4"}, "dtype must be one of .* got 'int4'"),
        ],
    )
    def test_bad_input_is_named(self, prompts: Any, options: dict[str, Any], message: str):
        options = {"max_new_tokens": NEW, **options}
        lengths = options.pop("prompt_lengths", None)
        with pytest.raises(ValueError, match=message):
            jaxkv.generate(decoders.decoder(), prompts, lengths, **options)
