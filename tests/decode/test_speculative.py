"""Guessing changes the number of steps and nothing else: tokens, log-probabilities and ends stay the same in every bit."""

import dataclasses
import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder, naive_greedy, random_prompts

import jaxkv
from jaxkv.decode.options import GenerateOptions, prepare
from jaxkv.decode.run_state import Job, start
from jaxkv.decode.speculation import Speculation
from jaxkv.decode.speculative import Draft, NGram

# The module, whose parts are run one by one.
internals = importlib.import_module("jaxkv.decode.generate")

pytestmark = pytest.mark.usefixtures("optimized")

PROMPTS = random_prompts(0, [1, 5, 9, 17, 3, 4])
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 24,
    "token_limits": jnp.array([24, 3, 20, 24, 1, 24]),
    "num_samples": 2,
    "sampling": jaxkv.Sampling(temperature=jnp.array([0.0, 1.0, 0.9, 0.0, 1.2, 0.7]), top_p=0.9),
    "key": jax.random.key(3),
    "eos_token_id": [3, 8],
    "max_seqs": 3,
    "page_size": 4,
    "num_pages": 20,
    "prefill_chunk": 4,
    "deterministic": True,
}


@pytest.fixture(scope="module")
def plain() -> jaxkv.GenerateOutput:
    """Three rows, a pool that preempts, samples that share a prompt, ends of both kinds, greedy and sampled prompts."""
    out = jaxkv.generate(decoder(), PROMPTS, **OPTIONS)
    assert int(out.stats.preemptions) > 0
    assert 0 < np.asarray(out.finished).sum() < 12
    return out


def assert_same(out: jaxkv.GenerateOutput, plain: jaxkv.GenerateOutput) -> None:
    for name in ("tokens", "lengths", "finished", "logprobs", "sampled_logprobs"):
        np.testing.assert_array_equal(getattr(out, name), getattr(plain, name), err_msg=name)


def run(speculative: NGram | Draft, on_token: Any = None, **changes: Any) -> tuple[jaxkv.GenerateOutput, Any]:
    """`generate` by its parts: the output, and the state at the end."""
    asked = GenerateOptions(speculative=speculative, on_token=on_token, **{**OPTIONS, **changes})
    job, plan, sizes, cut = prepare(decoder(), PROMPTS, None, asked)
    state = internals._start(decoder(), job, plan, sizes)
    state = internals.take_steps(decoder(), job, state, plan, jnp.int32(10_000))
    return internals._cut_output(state, job, cut), state


@pytest.mark.parametrize(
    "speculative",
    [
        NGram(num_tokens=3, max_ngram=2),
        Draft(decoder(seed=9, num_layers=1, num_kv_heads=1, head_dim=16, rope=jaxkv.Rope(rotary_dim=16)), 2),
        pytest.param(Draft(decoder("sandwich"), 5), marks=pytest.mark.slow),
        pytest.param(Draft(decoder(), 4), marks=pytest.mark.slow),
    ],
    ids=["ngram", "draft of another shape", "draft of another kind", "draft that is always right"],
)
def test_guesses_do_not_show(speculative: NGram | Draft, plain: jaxkv.GenerateOutput) -> None:
    told: dict[tuple[int, int], list[int]] = {}

    def on_token(prompt: int, sample: int, position: int, token: int) -> None:
        tokens = told.setdefault((prompt, sample), [])
        assert position == len(PROMPTS[prompt]) + len(tokens)
        tokens.append(token)

    out, state = run(speculative, on_token)
    jax.effects_barrier()
    assert_same(out, plain)
    for (prompt, sample), tokens in told.items():
        assert tokens == out.tokens[prompt, sample, : out.lengths[prompt, sample]].tolist()
    assert len(told) == 12
    state.cache.check()
    assert int(state.cache.num_free) == OPTIONS["num_pages"] - 1
    assert int(out.stats.steps) <= int(plain.stats.steps)


def test_right_guesses_save_steps_inside_a_callers_jit() -> None:
    """The prompt's step gives one token, each later one the 4 guesses and the one after them: 1 + 19 / 5 steps."""
    model = decoder()

    @jax.jit
    def roll_out(model: jaxkv.Decoder, draft: Draft) -> jaxkv.GenerateOutput:
        return jaxkv.generate(model, jnp.array([PROMPTS[1]]), max_new_tokens=20, speculative=draft)

    out = roll_out(model, Draft(model, num_tokens=4))
    assert out.tokens[0, 0].tolist() == naive_greedy(model, PROMPTS[1], 20)
    assert int(out.stats.steps) == 1 + 4


def test_samples_follow_the_distribution_of_the_model() -> None:
    """Chi-square over all sequences of 3 tokens of 4, every one but the first token of each by speculation."""
    model, draft, count = decoder(scale=4.0, vocab_size=4), decoder(scale=4.0, seed=5, vocab_size=4), 4000
    prompt = jnp.array([[3, 1, 2]])
    sampling = jaxkv.Sampling(temperature=1.3)
    out = jaxkv.generate(
        model, prompt, max_new_tokens=3, num_samples=count, sampling=sampling, key=jax.random.key(1), page_size=4,
        speculative=Draft(draft, num_tokens=2),
    )  # fmt: skip
    every = jnp.array(list(itertools.product(range(4), repeat=3)))
    whole = jnp.concatenate([jnp.tile(prompt, (len(every), 1)), every], axis=1)
    expected = count * np.exp(np.asarray(jaxkv.score(model, whole, sampling=sampling))[:, 3:].sum(axis=1))
    found = np.bincount(np.asarray(out.tokens)[0] @ np.array([16, 4, 1]), minlength=64)
    assert expected.min() >= 5, "the usual condition of the test"
    degrees = len(expected) - 1
    assert np.sum((found - expected) ** 2 / expected) < degrees + 4 * np.sqrt(2 * degrees)
    assert int(out.stats.steps) < 2 * count / 64 * 1.5, "some guesses were right"


@pytest.mark.parametrize(
    ("text", "guesses"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7, 1]),  # what followed 1 2 3
        ([1, 2, 3, 9, 5, 2, 3, 8, 5, 1, 2, 3], [9, 5, 2, 3]),  # three equal tokens beat the two of the later place
        ([2, 3, 9, 5, 2, 3, 8, 5, 6, 2, 3], [8, 5, 6, 2]),  # of two equally long ones the later
        ([4, 7, 7], [7, 7, 7, 7]),  # the text ends within the guess: it is taken to go on repeating
        ([5, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], None),
        ([6], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [1, 2])
def test_look_up(text: list[int], guesses: list[int] | None, given: int) -> None:
    """Whether a token was given or generated makes no difference: the first `given` ones are the prompt."""
    given = min(given, len(text))
    prompts = jnp.zeros((1, 6), jnp.int32).at[0, :given].set(jnp.array(text[:given]))
    sampling = jaxkv.Sampling().per_row(1)
    job = Job(prompts, jnp.array([given]), jnp.array([12]), None, sampling, jnp.zeros(0, jnp.int32), jnp.int32(1))
    cache = jaxkv.PagedKVCache.create(decoder().config, num_pages=2, max_seqs=2, max_seq_len=16)
    state = start(cache, 1, 12)
    made = len(text) - given
    state = dataclasses.replace(
        state,
        row_request=jnp.array([1, 0]),  # nobody in the first row
        tokens=state.tokens.at[0, :made].set(jnp.array(text[given:], jnp.int32)),
        out_lengths=jnp.array([made]),
    )
    known = state.known(job, state.row_request)
    found, any_found = Speculation(4, 3)._look_up(job, state, known)
    assert bool(any_found[1]) == (guesses is not None)
    if guesses is not None:
        assert found[1].tolist() == guesses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram(num_tokens=0), "num_tokens must be an integer >= 1, got 0"),
        (lambda: NGram(max_ngram=0), "max_ngram must be an integer >= 1, got 0"),
        (lambda: Draft(decoder(), num_tokens=-1), "num_tokens must be an integer >= 1, got -1"),
        (lambda: Draft(decoder(vocab_size=7)), "the draft model has a vocabulary of 7 tokens, the model one of 61"),
        (lambda: Draft(decoder(max_seq_len=16)), "the draft model allows 16 tokens, but sequences may have 17"),
    ],
    ids=["no guesses", "no n-gram", "negative", "vocabulary", "length"],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxkv.generate(decoder(), [[1, 2, 3]], max_new_tokens=14, speculative=make())
