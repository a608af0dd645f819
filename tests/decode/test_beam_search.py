"""Beam search: transformers' results, every sequence tried out, and what it costs. Bits: `test_deterministic.py`."""

import importlib
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import VOCAB, decoder
from families.tiny_models import FAMILIES, save_tiny, tokens

import jaxkv
from jaxkv.decode.beam_job import BeamJob, Search
from jaxkv.decode.beams import Rules
from jaxkv.ops.numerics import Numerics

# The module, whose parts are run one by one.
internals = importlib.import_module("jaxkv.decode.beam_search")

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 9, 7], [9]]


@pytest.fixture(scope="module")
def model() -> jaxkv.Decoder:
    return decoder()


def generated(out: jaxkv.BeamSearchOutput) -> list[list[list[int]]]:
    """Tokens without their padding, which is checked to be -1."""
    rows = np.asarray(out.tokens)
    lengths = np.asarray(out.lengths)
    assert ((rows == -1) == (np.arange(rows.shape[2]) >= lengths[:, :, None])).all()
    return [[r[:n].tolist() for r, n in zip(rs, ns, strict=True)] for rs, ns in zip(rows, lengths, strict=True)]


def by_transformers(theirs: Any, prompt: np.ndarray, **options: Any) -> tuple[list[list[int]], np.ndarray]:
    """Sequences without prompt and padding, and scores, of one prompt."""
    import torch

    ids = torch.from_numpy(prompt).long()[None]
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True, output_scores=True,
        pad_token_id=0, **options,
    )  # fmt: skip
    found = []
    for row in out.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in options["eos_token_id"]]
        found.append(row[: ends[0] + 1] if ends else row)
    return found, out.sequences_scores.numpy()


def assert_same_as_transformers(model: jaxkv.Decoder, theirs: Any, prompts: list[np.ndarray], **options: Any) -> Any:
    names = {"num_beams", "max_new_tokens", "eos_token_id", "num_return_sequences", "length_penalty", "early_stopping"}
    out = jaxkv.beam_search(model, [p.tolist() for p in prompts], **options)
    for i, prompt in enumerate(prompts):
        expected, scores = by_transformers(theirs, prompt, **{k: v for k, v in options.items() if k in names})
        assert generated(out)[i] == expected
        np.testing.assert_allclose(np.asarray(out.scores)[i], scores, rtol=2e-4, atol=2e-5)
    return out


QUICK = ("gpt_neox", "gemma2")  # what is particular to the others is not particular to beams


@pytest.mark.torch
@pytest.mark.parametrize("case", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES])
def test_every_family_gives_the_sequences_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = save_tiny(case, tmp_path)
    model, _ = jaxkv.load(tmp_path)
    prompts = [tokens(9, seed=1), tokens(4, seed=2), tokens(1, seed=3)]
    assert_same_as_transformers(
        model, theirs, prompts, num_beams=4, max_new_tokens=14, eos_token_id=[2, 5, 7], num_return_sequences=4, page_size=4
    )


@pytest.mark.torch
def test_length_penalty_and_early_stopping_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = save_tiny("llama", tmp_path)
    model, _ = jaxkv.load(tmp_path)
    prompts = [tokens(n, seed=n) for n in (1, 6, 8)]
    ends = list(range(2, 97, 3))
    steps = {}
    for early_stopping, penalty in ((False, 1.0), (True, 1.0), ("never", 1.0), (False, -0.8), (True, 0.0), ("never", 1.9)):
        out = assert_same_as_transformers(
            model, theirs, prompts, num_beams=3, max_new_tokens=16, eos_token_id=ends, num_return_sequences=3,
            length_penalty=penalty, early_stopping=early_stopping, page_size=4,
        )  # fmt: skip
        steps[early_stopping, penalty] = int(out.steps)
    assert steps[True, 1.0] < steps[False, 1.0] < steps["never", 1.0] <= 15, "the cases must tell the rules apart"


def test_beams_wide_enough_find_the_best_of_all_sequences() -> None:
    model, new = decoder(vocab_size=4), 4
    prompt = jnp.array([3, 1, 2])
    every = jnp.array(list(itertools.product(range(4), repeat=new)))
    whole = jnp.concatenate([jnp.tile(prompt, (len(every), 1)), every], axis=1)
    sums = np.asarray(jnp.sum(jaxkv.score(model, whole)[:, len(prompt) :], axis=1))
    best = np.argsort(-sums)[:10]
    out = jaxkv.beam_search(model, prompt[None], num_beams=64, max_new_tokens=new, num_return_sequences=10, length_penalty=0.0)
    assert generated(out)[0] == np.asarray(every)[best].tolist()
    np.testing.assert_allclose(np.asarray(out.scores)[0], sums[best], rtol=1e-5)


@pytest.mark.slow
def test_one_beam_is_greedy(model: jaxkv.Decoder) -> None:
    options = {"max_new_tokens": 20, "eos_token_id": [18, 30], "page_size": 4}
    out = jaxkv.beam_search(model, PROMPTS, num_beams=1, early_stopping=True, **options)
    greedy = jaxkv.generate(model, PROMPTS, **options)
    np.testing.assert_array_equal(out.tokens, greedy.tokens)
    np.testing.assert_array_equal(out.lengths, greedy.lengths)
    assert np.asarray(greedy.finished).any()
    means = np.sum(np.asarray(greedy.logprobs), axis=2) / np.asarray(greedy.lengths)
    np.testing.assert_allclose(out.scores, means, rtol=1e-5)


OPTIONS: dict[str, Any] = {
    "num_beams": 4,
    "max_new_tokens": 12,
    "num_return_sequences": 2,
    "eos_token_id": [5, 6],
    "deterministic": True,
}


def test_inside_a_callers_jit_other_prompts_compile_nothing(model) -> None:
    width = max(map(len, PROMPTS))
    padded = jnp.array([p + [0] * (width - len(p)) for p in PROMPTS])

    @jax.jit
    def search(model, prompts, lengths, penalty):
        return jaxkv.beam_search(model, prompts, lengths, length_penalty=penalty, **OPTIONS)

    out = search(model, padded, jnp.array([len(p) for p in PROMPTS]), jnp.float32(1.0))
    np.testing.assert_array_equal(out.tokens, jaxkv.beam_search(model, PROMPTS, **OPTIONS).tokens)
    search(model, padded[::-1], jnp.array([1, 3, 9]), jnp.float32(0.5))
    assert search._cache_size() == 1


def test_other_prompts_and_rules_compile_nothing(model) -> None:
    # Searched here and not by the fixture: conftest may have forgotten the fixture's program since.
    jaxkv.beam_search(model, PROMPTS, **OPTIONS)
    before = internals._beam_search._cache_size()
    other = [[2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6], [1, 6]]
    jaxkv.beam_search(model, other, **OPTIONS, length_penalty=0.3, early_stopping="never")
    assert internals._beam_search._cache_size() == before


def finish(model: jaxkv.Decoder, *, page_size: int, num_pages: int, **sizes: int) -> Any:
    """The last state of a search of PROMPTS' first, its cache included."""
    beams, new = sizes["num_beams"], sizes["max_new"]
    search = Search(beams, new, 1, 16, Numerics())
    prompt = jnp.array([PROMPTS[0]])
    shape = jaxkv.CacheConfig(num_pages, page_size, beams, prompt.shape[1] + new)
    rules = Rules(jnp.float32(1.0), jnp.bool_(False), jnp.bool_(False), jnp.int32(new))
    job = BeamJob(prompt, jnp.array([prompt.shape[1]]), rules, jnp.array([5, 6]), jnp.int32(1))
    return jax.jit(internals._run, static_argnums=(2, 3))(model, job, search, shape)


def test_every_page_is_free_at_the_end_and_none_was_short(model) -> None:
    """9 tokens in pages of 4: two full pages shared, and 3 own ones of each of 4 beams for the other 1 + 11."""
    state = finish(model, num_beams=4, max_new=12, page_size=4, num_pages=2 + 4 * 3 + 1)
    state.cache.check()
    assert int(state.cache.num_free) == 14
    assert not np.asarray(state.cache.out_of_pages).any()
    assert 2 + 4 <= int(state.peak_pages) <= 14


def test_beams_share_the_pages_of_their_prompt(model) -> None:
    prompt = [list(range(30))]
    out = jaxkv.beam_search(model, prompt, num_beams=6, max_new_tokens=2, page_size=4)
    assert int(out.peak_pages) == 7 + 6, "28 tokens shared, the partly filled page copied once per beam"


def test_no_step_copies_the_pool(model) -> None:
    """In the compiled program only the making of the pool may copy something of its size."""
    search = jax.jit(lambda m, p: jaxkv.beam_search(m, p, num_beams=3, max_new_tokens=8, page_size=4, num_pages=997))
    program = search.lower(model, jnp.array([PROMPTS[0]])).compile().as_text()
    computations = re.split(r"\n(?=\S.*\{\n)", program)
    (entry,) = (c for c in computations if c.startswith("ENTRY"))
    rest = [c for c in computations if c is not entry]
    assert any("f32[997,2,4,8]" in c for c in rest)
    copies = [line.strip() for c in rest for line in c.splitlines() if re.search(r"= f32\[997,2,4,8\]\S* copy\(", line)]
    assert not copies


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"page_size": 0}, "page_size must be an integer >= 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be an integer >= 1, got 0"),
        ({"num_return_sequences": 5}, "num_return_sequences is 5, but num_beams is only 4"),
        ({"early_stopping": "sometimes"}, "early_stopping must be True, False or 'never', got 'sometimes'"),
        ({"length_penalty": jnp.ones(2)}, r"length_penalty must be one number, got shape \[2\]"),
        ({"eos_token_id": list(range(VOCAB))}, "61 end tokens leave no other in a vocabulary of 61"),
        ({"max_new_tokens": 120}, "a prompt of 9 tokens and 120 new ones are 129, but the model allows 128"),
        ({"page_size": 4, "num_pages": 42}, "num_pages is 42, .* need 43 pages of 4 tokens, the null page included"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes_are_named(model, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxkv.beam_search(model, PROMPTS, **(OPTIONS | changed))


def test_a_token_outside_the_vocabulary_is_named(model) -> None:
    with pytest.raises(ValueError, match="token id 61 is outside the vocabulary"):
        jaxkv.beam_search(model, [[1, 61]], num_beams=2, max_new_tokens=2)


def test_with_traced_lengths_the_pool_must_do_for_any(model) -> None:
    padded = jnp.zeros((3, 9), jnp.int32)
    search = jax.jit(lambda n: jaxkv.beam_search(model, padded, n, **OPTIONS, page_size=4, num_pages=51))
    with pytest.raises(ValueError, match="num_pages is 51, .* need 52 pages"):
        search(jnp.array([9, 3, 1]))


def test_a_result_says_what_it_is_in_a_line_or_two(model) -> None:
    out = jaxkv.beam_search(model, PROMPTS, **OPTIONS)
    assert repr(out).startswith("BeamSearchOutput(3 prompts, ") and len(repr(out)) < 300
    traced = jax.jit(lambda x: (str(x), x)[1]).trace(out)
    assert traced is not None
