"""Outside a caller's jit any prompts, limits and numbers of prompts share a few programs, with the results of exact shapes."""

import itertools
import re
from pathlib import Path

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

import jaxkv
from jaxkv import Sampling
from jaxkv.programs import ladder

LONGEST, NEW = 900, 100
MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="module")
def model() -> jaxkv.Decoder:
    return decoders.decoder(max_seq_len=1024)


def random_calls(number: int, seed: int = 0) -> list[dict]:
    """Arguments of calls of every size, greedy and sampled."""
    random, calls = np.random.default_rng(seed), []
    for _ in range(number):
        lengths = random.integers(1, LONGEST + 1, random.integers(1, 9))
        sampled = random.random() < 0.5
        calls.append(
            {
                "prompts": [random.integers(0, decoders.VOCAB, n).tolist() for n in lengths],
                "max_new_tokens": int(random.integers(1, NEW + 1)),
                "sampling": Sampling(0.8, top_k=int(random.integers(0, 20)), top_p=float(random.uniform(0.5, 1)))
                if sampled
                else None,
                "eos_token_id": random.integers(0, decoders.VOCAB, random.integers(0, 4)).tolist(),
            }
        )
    return calls


@pytest.fixture(scope="module")
def logits_of(model: jaxkv.Decoder):
    """Logits of the dense pass, one program for all sequences."""
    run = jax.jit(lambda m, tokens: m(tokens)[0])
    return lambda ids: np.asarray(run(model, np.asarray([ids + [0] * (LONGEST + NEW - len(ids))])))


@pytest.mark.slow
def test_fifty_calls_of_every_size(model, logits_of) -> None:
    """At most one program for each rung and kind; greedy tokens are the dense pass's, log-probabilities too."""
    calls, key = random_calls(50), jax.random.key(7)
    jax.block_until_ready(key)
    with compilations() as programs:
        outs = [jaxkv.generate(model, key=key, **call) for call in calls]
        outs = jax.device_get(outs)
    rungs = {(ladder.rows(len(call["prompts"])), call["sampling"] is None) for call in calls}
    widths = {
        (rows, greedy, ladder.prompt(max(map(len, call["prompts"])), 1024))
        for call in calls
        for rows, greedy in rungs
        if (ladder.rows(len(call["prompts"])), call["sampling"] is None) == (rows, greedy)
    }
    assert len(programs) <= 2 * len(widths), programs
    for call, out in itertools.islice(zip(calls, outs), 12):
        ends = set(call["eos_token_id"])
        for i, prompt in enumerate(call["prompts"]):
            made = out.tokens[i, 0, : out.lengths[i, 0]].tolist()
            assert 1 <= len(made) <= call["max_new_tokens"] and not ends & set(made[:-1])
            assert out.finished[i, 0] == (made[-1] in ends)
            assert len(made) == call["max_new_tokens"] or out.finished[i, 0]
            own = jax.nn.log_softmax(logits_of(prompt + made)[len(prompt) - 1 : len(prompt) + len(made) - 1])
            np.testing.assert_allclose(out.logprobs[i, 0, : len(made)], own[np.arange(len(made)), made], atol=1e-4)
            if call["sampling"] is None:
                assert (np.max(own, axis=1) - own[np.arange(len(made)), made] < 1e-4).all()


@pytest.mark.slow
@pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's /proc")
def test_two_hundred_calls_of_random_sizes_do_not_grow_the_process(model) -> None:
    """Memory maps, of which each compiled program has some, and resident bytes: the second hundred adds next to nothing."""
    key, sizes = jax.random.key(3), []
    for call in random_calls(200, seed=1):
        jax.block_until_ready(jaxkv.generate(model, key=key, **call).tokens)
        resident = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))
        sizes.append((MAPS.read_bytes().count(b"\n"), resident / 1024))
    maps, mebibytes = np.array(sizes).T
    assert maps[-1] - maps[99] <= 0.1 * maps[99], maps[[0, 99, -1]]
    assert mebibytes[-1] - mebibytes[99] <= 0.1 * mebibytes[99], mebibytes[[0, 99, -1]]


def small_calls() -> list[dict]:
    """The sizes that matter, on rungs that two calls have in common."""
    prompts = decoders.random_prompts(3, [5, 1, 17, 30])
    return [
        {"prompts": prompts[:3], "max_new_tokens": 7, "eos_token_id": ()},
        {"prompts": prompts[:4], "max_new_tokens": 20, "eos_token_id": [3, 5, 8]},
        {"prompts": prompts[3:] + prompts[:2], "max_new_tokens": 1, "eos_token_id": 4},
    ]


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, top_p=0.9)], ids=["greedy", "sampled"])
def test_other_sizes_compile_nothing_and_the_results_are_those_of_exact_shapes(sampling: Sampling | None) -> None:
    model, key = decoders.decoder(), jax.random.key(1)
    first, *others = small_calls()
    options = {"sampling": sampling, "key": key, "deterministic": True}
    jaxkv.generate(model, **first, **options)
    with compilations() as programs:
        outs = [jaxkv.generate(model, **call, **options) for call in others]
        jax.device_get(outs)
    assert programs == []
    call, out = others[0], outs[0]
    exact = jax.jit(lambda m, k: jaxkv.generate(m, **call, **{**options, "key": k}))(model, key)
    for name in ("tokens", "lengths", "logprobs", "sampled_logprobs", "finished"):
        np.testing.assert_array_equal(getattr(out, name), getattr(exact, name), err_msg=name)
    assert out.tokens.shape == (4, 1, 20) and int(out.stats.preemptions) == 0


def test_a_stream_is_the_program_of_generate() -> None:
    model = decoders.decoder()
    first, second, _ = small_calls()
    out = jaxkv.generate(model, **first)
    with compilations() as programs:
        tokens = list(jaxkv.stream(model, **first, steps_per_turn=3)) + list(jaxkv.stream(model, **second))
    assert programs == []
    made = [t.token for t in tokens[: 3 * 7] if t.prompt == 1]
    assert made[:7] == out.tokens[1, 0].tolist()


def test_extend_takes_ragged_widths_in_few_programs() -> None:
    model = decoders.decoder()
    widths = [1, 2, 5, 16, 9, 17, 20]
    ids = np.asarray(decoders.random_tokens(5, 1, sum(widths)))
    expected = decoders.plain_logits(model, jnp.asarray(ids))[0]
    for all_logits in (False, True):
        cache, done = jaxkv.PagedKVCache.create(model.config, num_pages=12, page_size=8, max_seqs=2, max_seq_len=80), 0
        with compilations() as programs:
            for width in widths:
                tokens = np.zeros((2, width), np.int64)
                tokens[1] = ids[0, done : done + width]
                logits, cache = jaxkv.extend(model, cache, tokens, np.array([0, width]), all_logits=all_logits)
                done += width
                last = np.asarray(logits)[1]
                want = expected[done - width : done] if all_logits else expected[done - 1]
                np.testing.assert_allclose(last, want, atol=1e-4)
                assert logits.shape == ((2, width) if all_logits else (2,)) + (decoders.VOCAB,)
        assert len([name for name in programs if "extend" in name]) <= 3, "1, 16 and 32 tokens"
        assert len(programs) <= 4, programs


def test_score_beams_and_naive_decoding_share_programs_too() -> None:
    model = decoders.decoder()
    first, second, third = ([list(p) for p in call["prompts"]] for call in small_calls())
    runs = {
        "score": lambda prompts, new: jaxkv.score(model, prompts),
        "beam": lambda prompts, new: jaxkv.beam_search(model, prompts, num_beams=2, max_new_tokens=new, eos_token_id=[new]),
        "naive": lambda prompts, new: jaxkv.generate_naive(model, prompts, max_new_tokens=new, eos_token_id=()),
    }
    for name, run in runs.items():
        jax.block_until_ready(run(second, 2))
        with compilations() as programs:
            a, b = run(first + first[:1], 2), run(third + third[2:], 1)
            jax.block_until_ready((a, b))
        assert programs == [], name
    tokens, made = runs["naive"](first, 5)
    out = jaxkv.generate(model, first, max_new_tokens=5, eos_token_id=())
    np.testing.assert_array_equal(tokens, out.tokens[:, 0])
    assert made.tolist() == [5, 5, 5]


def test_under_grad_and_vmap_without_jit_the_ladder_holds() -> None:
    model = decoders.decoder()
    tokens = decoders.random_tokens(2, 3, 11)
    lengths = np.array([11, 4, 7])

    def loss(m: jaxkv.Decoder, tokens) -> jax.Array:
        return jnp.sum(jaxkv.score(m, tokens, lengths))

    value = loss(model, tokens)
    graded, grads = jax.value_and_grad(loss, allow_int=True)(model, tokens)
    np.testing.assert_allclose(value, graded, rtol=1e-6)
    exact = jax.jit(jax.grad(loss))(model, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), grads, exact)

    keys = jax.random.split(jax.random.key(4), 2)
    run = lambda key: jaxkv.generate(model, tokens, lengths, max_new_tokens=3, sampling=Sampling(1.0), key=key).tokens
    both = jax.vmap(run)(keys)
    np.testing.assert_array_equal(both, np.stack([run(key) for key in keys]))
