"""What people pass, to every entry point: it works and equals the plain call, or one line names the argument, before any work.

Run as users run: without the run-time check of annotations, which would speak first.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling, viz

MODEL_CHANGES: dict[str, Any] = {"num_layers": 1, "windows": ()}
IDS = [[5, 7, 3], [9, 2, 4]]


@pytest.fixture(autouse=True)
def as_users_run():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def model() -> jaxkv.Decoder:
    return decoders.decoder(**MODEL_CHANGES)


def cache() -> jaxkv.PagedKVCache:
    return jaxkv.PagedKVCache.create(model().config, num_pages=9, page_size=4, max_seqs=2, max_seq_len=16)


def streamed(*args: Any, **options: Any) -> list[int]:
    return [token.token for token in jaxkv.stream(*args, **options)]


GENERATED = {"max_new_tokens": 2, "page_size": 4}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "generate": (lambda model, prompts, **o: jaxkv.generate(model, prompts, **o).tokens, {"prompts": IDS, **GENERATED}),
    "stream": (streamed, {"prompts": IDS, **GENERATED}),
    "record": (lambda *a, **o: viz.record(*a, **o).output.tokens, {"prompts": IDS, **GENERATED}),
    "beam_search": (lambda *a, **o: jaxkv.beam_search(*a, **o).tokens, {"prompts": IDS, "num_beams": 2, **GENERATED}),
    "generate_naive": (lambda *a, **o: jaxkv.generate_naive(*a, **o)[0], {"prompts": IDS, "max_new_tokens": 2}),
    "score": (jaxkv.score, {"tokens": IDS}),
    "model": (lambda model, tokens: model(tokens), {"tokens": IDS}),
    "extend": (
        lambda model, tokens, **o: jaxkv.extend(model, o.pop("cache", cache()), tokens, **o)[0],
        {"tokens": IDS, "num_tokens": [3, 3]},
    ),
}

# What is the same, and what is none, for each kind of argument.
SAME: dict[str, list[Any]] = {
    "ids": [
        np.asarray(IDS), np.asarray(IDS, np.uint64), np.asarray(IDS, np.int8), jnp.asarray(IDS), tuple(map(tuple, IDS)),
        [np.asarray(row) for row in IDS], [[np.int64(x) for x in row] for row in IDS], [range(5, 6), *IDS][1:],
    ],
    "count": [np.int64, np.int32, np.uint8, jnp.asarray, np.asarray],
    "counts": [np.asarray, tuple, jnp.asarray, lambda x: np.asarray(x, np.uint64)],
}  # fmt: skip
JUNK: dict[str, list[Any]] = {
    "ids": [
        "a text", ["a text", "two"], [3, 4], np.asarray([3, 4]), {"input_ids": IDS}, collections.UserDict(input_ids=IDS), [], [[]],
        [[1], []], [[5.9, 7.2]], [["5", "7"]], [[True, False]], [[2**32 + 5, 7], [1, 2]], [[2**70, 1], [1, 1]], [[-1, 2], [1, 2]],
        np.asarray([[2**32 + 5, 7], [1, 2]]), np.asarray([[2**40, 7], [1, 2]], np.uint64), np.ones((2, 3)), np.ones((2, 3), bool),
        np.zeros((0, 3), int), np.zeros((2, 0), int), np.ones((1, 2, 3), int), None, 7, 1.5, {1, 2}, object(), [None, [1]], [[None]],
        [[[1, 2]], [[3, 4]]], b"bytes", jnp.ones((2, 3)), [{"a": 1}], np.asarray([["a", "b"]]), [[61, 1, 2], [1, 2, 3]],
    ],
    "count": ["2", 2.0, 0, -1, True, None, [2], 2**40, float("nan"), np.bool_(True), np.float32(2), object(), np.ones(2, int)],
    "counts": ["33", [1.0, 2.0], [1], [[1, 2]], [9, 9], [-1, 2], 3, True, [True, True], [2**40, 1], {}, object(), ["a", "b"]],
    "key": [0, 1.5, "key", np.int64(3), jnp.arange(2), np.zeros(3, np.uint32), [1, 2], True, object(), np.zeros((3, 2), np.uint32)],
    "sampling": [0.7, {"temperature": 1.0}, "greedy", 3, [1.0], object(), True],
    "ends": [1.5, "</s>", [2.0], 61, -1, [3, 2**40], True, ["a"], {1}, [[1], [2]], np.ones(2), object()],
    "model": [None, "gpt2", object(), 3],
    "flag": [1, "yes", None, 0.5, [True]],
    "name": ["cuda", 3, ["xla"], object()],
    "dtype": ["int4", 8, np.float32, ["float32"]],
    "function": [3, "print"],
}  # fmt: skip
KINDS = {
    "prompts": "ids", "tokens": "ids", "max_new_tokens": "count", "page_size": "count", "num_beams": "count", "num_tokens": "counts",
    "model": "model",
}  # fmt: skip
MORE: dict[str, dict[str, str]] = {
    "generate": {
        "key": "key", "sampling": "sampling", "eos_token_id": "ends", "num_samples": "count", "token_limits": "counts",
        "num_pages": "count", "max_seqs": "count", "prefill_chunk": "count", "cache_dtype": "dtype", "deterministic": "flag",
        "implementation": "name", "on_token": "function", "speculative": "function",
    },
    "beam_search": {"eos_token_id": "ends", "num_return_sequences": "count", "prefill_chunk": "count", "deterministic": "flag"},
    "generate_naive": {"key": "key", "sampling": "sampling", "eos_token_id": "ends"},
    "score": {"sampling": "sampling", "deterministic": "flag", "remat": "flag", "lengths": "counts"},
    "extend": {"all_logits": "flag", "deterministic": "flag", "cache": "model"},
    "stream": {"steps_per_turn": "count", "on_turn": "function", "key": "key"},
}  # fmt: skip
OPTIONAL = {"num_pages", "max_seqs", "prefill_chunk"}  # None is their default


def try_one(rng: np.random.Generator, plain: dict[str, Any]) -> None:
    call = sorted(CALLS)[rng.integers(len(CALLS))]
    function, arguments = CALLS[call]
    arguments = {"model": model(), **arguments}
    kinds = {**{name: KINDS[name] for name in arguments}, **MORE.get(call, {})}
    if call == "model":
        del kinds["model"]  # it is the function
    name = sorted(kinds)[rng.integers(len(kinds))]
    kind = kinds[name]
    if kind in SAME and name in arguments and rng.random() < 0.2:
        value = SAME[kind][rng.integers(len(SAME[kind]))]
        arguments[name] = value(arguments[name]) if callable(value) else value
        if call not in plain:
            plain[call] = function(**{"model": model(), **CALLS[call][1]})
        np.testing.assert_array_equal(function(**arguments), plain[call], f"{call}({name}={value!r})")
        return
    value = JUNK[kind][rng.integers(len(JUNK[kind]))]
    if value is None and name in OPTIONAL:
        return
    with pytest.raises((ValueError, TypeError)) as caught:
        function(**{**arguments, name: value})
    message = str(caught.value)
    assert name in message and "\n" not in message and len(message) < 300, f"{call}({name}={value!r}): {message}"


def test_junk_of_all_kinds_is_named_in_one_line():
    rng, plain = np.random.default_rng(0), {}
    for _ in range(150):
        try_one(rng, plain)


@pytest.mark.slow
def test_much_junk_of_all_kinds_is_named_in_one_line():
    rng, plain = np.random.default_rng(1), {}
    for _ in range(2000):
        try_one(rng, plain)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([3, 4, 5], r"prompts is a flat list, \[3, 4, 5\]: one prompt is a list of ids inside of a list, \[\[...\]\]"),
        ("hello", r"prompts is a text, 'hello': give its token ids, tokenizer\(\[text\]\)\[\"input_ids\"\]"),
        (["hello"], r"prompts\[0\] is a text, 'hello'"),
        ({"input_ids": IDS}, r"prompts is a dict: give its ids, prompts\[\"input_ids\"\]"),
        (
            np.asarray([[2**32 + 5, 7]]),
            r"prompts\[0\]\[0\]: token id 4294967301 is outside the vocabulary",
        ),  # once it ran as id 5
        (np.asarray([[2**40, 7]], np.uint64), "token id 1099511627776 is outside the vocabulary"),
        ([[5.9, 7.2]], r"prompts\[0\]\[0\] must be a token id, an integer, got 5.9"),  # once as 5 and 7
        ([["5", "7"]], r"prompts\[0\]\[0\] must be a token id, an integer, got '5'"),  # once as 5 and 7
    ],
)
def test_prompts_that_are_none(prompts: Any, message: str):
    with pytest.raises(ValueError, match=message):
        jaxkv.generate(model(), prompts, max_new_tokens=1)


def test_a_wrapper_and_a_pair_in_place_of_the_decoder_say_the_way_out():
    for given, message in (
        (jaxkv.CausalLM(model()), "model.decoder"),
        ((model(), None), "jaxkv.load returns model and tokenizer"),
    ):
        for call, (function, arguments) in CALLS.items():
            if call != "model":
                with pytest.raises(ValueError, match=f"model must be a jaxkv.Decoder, .*{message}"):
                    function(given, **arguments)


def test_an_integer_in_place_of_a_key_says_the_way_out():
    with pytest.raises(ValueError, match=r"got 0: pass key=jax.random.key\(0\)"):
        jaxkv.generate(model(), IDS, max_new_tokens=1, sampling=Sampling(1.0), key=0)  # type: ignore[arg-type]


def test_ragged_rows_are_padded_for_score_and_refused_by_the_model():
    padded, lengths = jnp.asarray([[5, 7, 3], [9, 0, 0]]), jnp.asarray([3, 1])
    np.testing.assert_allclose(jaxkv.score(model(), [[5, 7, 3], [9]]), jaxkv.score(model(), padded, lengths))
    with pytest.raises(ValueError, match=r"tokens has rows of \[3, 1\] ids: pad them"):
        model()([[5, 7, 3], [9]])


def test_none_is_off_in_sampling():
    """top_k=None was accepted, and failed later without its name."""
    options = {"max_new_tokens": 2, "page_size": 4, "key": jax.random.key(0)}
    plain = jaxkv.generate(model(), IDS, sampling=Sampling(1.0), **options).tokens
    none = Sampling(temperature=None, top_k=None, top_p=None, min_p=None)
    np.testing.assert_array_equal(jaxkv.generate(model(), IDS, sampling=none, **options).tokens, plain)
    assert jax.tree.leaves(none) == []


def test_sample_takes_plain_numbers():
    logits, keys = jax.random.normal(jax.random.key(0), (3, 16)), jax.random.split(jax.random.key(1), 3)
    for got, want in zip(jaxkv.sample(logits, Sampling(1.0, 4), keys), jaxkv.sample(logits, Sampling(1.0, 4).per_row(3), keys)):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="keys must be a key for each of the 3 rows"):
        jaxkv.sample(logits, Sampling(1.0), jax.random.key(0))


def test_numpy_integers_are_integers():
    """np.int64(3) was "no integer"; every size, of models, caches and guesses, is a Python int afterwards."""
    config = decoders.config()
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if type(getattr(config, f.name)) is int}
    same = dataclasses.replace(config, **{name: np.int64(n) for name, n in sizes.items()})
    assert same == config and {type(getattr(same, name)) for name in sizes} == {int}
    assert type(jaxkv.Rope(rotary_dim=np.int32(8)).rotary_dim) is int
    assert type(jaxkv.CacheConfig(np.int64(4), np.int64(4), np.int64(1), np.int64(8)).num_pages) is int
    assert jaxkv.NGram(np.int64(4), np.int8(3)) == jaxkv.NGram() and jaxkv.Draft(model(), np.int64(4)).num_tokens == 4


def test_what_decides_on_shapes_cannot_be_traced():
    with pytest.raises(ValueError, match="max_new_tokens is traced, but decides on shapes"):
        jax.jit(lambda n: jaxkv.generate(model(), IDS, max_new_tokens=n))(2)


def test_a_donated_cache_says_so():
    """It was 4,000 characters of JAX's, and not always an error."""
    old = cache()
    _, new = jaxkv.extend(model(), old, IDS, [3, 3])
    count, rows = jnp.ones(2, jnp.int32), jnp.asarray([0])
    uses: list[Callable[[], Any]] = [
        lambda: jaxkv.extend(model(), old, IDS, [3, 3]), lambda: old.allocate(count), lambda: old.advance(count), lambda: old.free(rows),
        lambda: old.fork(0, 1), lambda: old.truncate(count), old.stats, old.check, old.bookkeeping, old.pages_held,
        lambda: old.pages_needed(count), lambda: viz.page_map(old),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match="^this cache was donated; use the one returned$"):
            use()
    assert repr(old).endswith("<donated>") and "donated" not in repr(new) and old._repr_html_() is None


def test_reprs_are_a_few_lines():
    """A model's was 124 KB: every layer repeated the configuration."""
    out = jaxkv.generate(model(), IDS, **GENERATED)
    for value, words in (
        (model(), "1 layers, 4 heads of 8 (2 kv), hidden 32, vocabulary 61"),
        (out, "4 tokens made"),
        (cache(), "9 pages of 4 tokens"),
        (jaxkv.sequences(IDS, None, out), "2 rows of up to 5 tokens, 10 in all, 4 of them generated"),
    ):
        assert words in repr(value) and len(repr(value)) < 400 and repr(value).count("\n") < 4 and str(value) == repr(value)
    seen: list[str] = []
    jax.jit(lambda o, c: seen.append(repr(o) + repr(c)))(out, cache())
    assert "2 prompts" in seen[0] and "some free" in seen[0]
    assert "Decoder(" in repr(jax.eval_shape(lambda: model()))


def test_stats_count_bytes():
    _, used = jaxkv.extend(model(), cache(), IDS, [3, 3])
    page = sum(x.nbytes for x in jax.tree.leaves(used.pages)) // 9
    assert (used.stats().bytes_total, used.stats().bytes_used) == (9 * page, 2 * page)


def test_the_package_says_what_is_there():
    for module in (jaxkv, viz):
        assert sorted(module.__all__) == dir(module)
    with pytest.raises(ImportError, match="jaxkv has no AutoTokenizer; use .*jaxkv"):
        _ = jaxkv.AutoTokenizer  # pyright: ignore[reportAttributeAccessIssue]
    made = jaxkv.PagedKVCache.of_sizes(model().config, jaxkv.CacheConfig(num_pages=4, page_size=4, max_seqs=1, max_seq_len=8))
    assert made.num_pages == 4
