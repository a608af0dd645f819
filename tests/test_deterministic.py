"""Deterministic mode: `generate`'s log-probabilities are `score`'s, to the last bit, whatever the batch, pages and pool were."""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.config import pages_for

pytestmark = pytest.mark.usefixtures("optimized")

NEW, SEQ = 10, 32
KEY = jax.random.key(11)
HOT = Sampling(temperature=1.2, top_k=40)
PROMPTS = decoders.random_prompts(7, [1, 16, 5, 8, 3, 17, 2, 11])


def texts(prompts: list[list[int]], out: jaxkv.GenerateOutput) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """Every sample's whole text, padded, and its length; which positions were generated, and their log-probabilities."""
    count = len(prompts) * out.tokens.shape[1]
    tokens, lengths = np.zeros((count, SEQ), np.int32), np.zeros(count, np.int32)
    made, logprobs = np.zeros((count, SEQ), bool), np.zeros((count, SEQ), np.float32)
    for row in range(count):
        prompt, sample = divmod(row, out.tokens.shape[1])
        n, first = int(out.lengths[prompt, sample]), len(prompts[prompt])
        tokens[row, :first], tokens[row, first : first + n] = prompts[prompt], out.tokens[prompt, sample, :n]
        lengths[row], made[row, first : first + n] = first + n, True
        logprobs[row, first : first + n] = out.logprobs[prompt, sample, :n]
    return jnp.asarray(tokens), jnp.asarray(lengths), made, logprobs


def assert_no_mismatch(model: jaxkv.Decoder, prompts: list[list[int]], out: jaxkv.GenerateOutput) -> None:
    tokens, lengths, made, logprobs = texts(prompts, out)
    scored = np.asarray(jaxkv.score(model, tokens, lengths, deterministic=True))
    assert np.abs(logprobs[made]).max() > 0
    assert np.abs(scored[made] - logprobs[made]).max() == 0.0


def run(model: jaxkv.Decoder, prompts: list[list[int]], **options: Any) -> jaxkv.GenerateOutput:
    options = {"sampling": HOT, "key": KEY, "max_new_tokens": NEW, "eos_token_id": [3, 14], **options}
    return jaxkv.generate(model, prompts, deterministic=True, **options)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("dtype", "rows", "page_size", "chunk", "tight"),
    [
        ("float32", 3, 1, 5, True),
        slow("float32", 8, 16, 32, False),
        ("bfloat16", 3, 8, 7, True),
        slow("float32", 1, 8, 1, True),
        slow("float32", 5, 3, 16, True),
        slow("bfloat16", 8, 1, 32, False),
        slow("bfloat16", 1, 16, 3, True),
    ],
)
def test_rows_pages_chunks_and_preemption(dtype: str, rows: int, page_size: int, chunk: int, tight: bool):
    model = decoders.decoder(dtype=dtype)
    num_pages = pages_for(17 + NEW, page_size) + 2 if tight else None
    out = run(model, PROMPTS, max_seqs=rows, page_size=page_size, prefill_chunk=chunk, num_pages=num_pages)
    assert_no_mismatch(model, PROMPTS, out)
    if tight and rows > 1:
        assert int(out.stats.preemptions) > 0


@pytest.mark.parametrize(
    "architecture",
    [
        "learned",
        "sandwich",  # here and in post what a norm gives is added or normed at once, and may be fused with it
        *(slow(a) for a in ("mha", "mqa", "parallel", "window", "dynamic", "post")),
    ],
)
def test_architectures(architecture: str):
    model = decoders.decoder(architecture)
    assert_no_mismatch(model, PROMPTS, run(model, PROMPTS, max_seqs=5, page_size=4, prefill_chunk=6))


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_shared_prompts(dtype: str):
    model, prompts = decoders.decoder(dtype=dtype), PROMPTS[:4]
    out = run(model, prompts, num_samples=3, max_seqs=5, page_size=4, num_pages=14)
    assert_no_mismatch(model, prompts, out)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mates", [0, 1, 15, 63])
def test_batch_mates(mates: int, dtype: str):
    model = decoders.decoder(dtype=dtype)
    prompts = [PROMPTS[1], *decoders.random_prompts(mates, [1 + i % 17 for i in range(mates)])]
    out = run(model, prompts, max_seqs=len(prompts))
    alone = run(model, prompts[:1])
    np.testing.assert_array_equal(out.tokens[0], alone.tokens[0])
    np.testing.assert_array_equal(out.logprobs[0], alone.logprobs[0])
    assert_no_mismatch(model, prompts, out)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_score_does_not_depend_on_its_batch_or_padding(dtype: str):
    model, tokens = decoders.decoder(dtype=dtype), decoders.random_tokens(0, 9, SEQ)
    lengths = jnp.asarray([32, 1, 7, 16, 20, 31, 2, 9, 17])
    want = np.asarray(jaxkv.score(model, tokens, lengths, deterministic=True))
    for rows in ([0], [3, 5], list(range(8, -1, -1))):
        got = jaxkv.score(model, tokens[jnp.asarray(rows)], lengths[jnp.asarray(rows)], deterministic=True)
        np.testing.assert_array_equal(got, want[rows])
    wide = jnp.pad(tokens, ((0, 0), (0, 25)))
    np.testing.assert_array_equal(jaxkv.score(model, wide, lengths, deterministic=True)[:, :SEQ], want)


@pytest.mark.slow
def test_score_does_not_depend_on_rematerialisation():
    model, tokens = decoders.decoder("sandwich"), decoders.random_tokens(0, 3, SEQ)
    want = jaxkv.score(model, tokens, deterministic=True)
    np.testing.assert_array_equal(jaxkv.score(model, tokens, deterministic=True, remat=True), want)


def test_value_under_grad_is_the_value():
    """The trainer's forward pass runs inside value_and_grad and inside another jit: the ratio must be exactly one there."""
    model = decoders.decoder()
    out = run(model, PROMPTS, max_seqs=8)
    tokens, lengths, made, logprobs = texts(PROMPTS, out)

    @jax.jit
    def loss(model: jaxkv.Decoder) -> tuple[jax.Array, jax.Array]:
        scored = jaxkv.score(model, tokens, lengths, deterministic=True)
        ratio = jnp.where(made, jnp.exp(scored - logprobs), 1.0)
        return -jnp.mean(ratio), ratio

    (_, ratio), _ = jax.value_and_grad(loss, has_aux=True)(model)
    assert (ratio == 1.0).all()


@pytest.mark.parametrize("architecture", ["mha", slow("mqa"), slow("window"), slow("sandwich")])
def test_the_kernel_agrees_with_itself_and_with_xla(architecture: str):
    """The same on the Triton kernel, interpreted: rollout and score alike run it, and the tokens are XLA's."""
    model, prompts = decoders.decoder(architecture), PROMPTS[:4]
    out = {
        name: jaxkv.generate(
            model, prompts, max_new_tokens=6, max_seqs=2, page_size=4, prefill_chunk=6, deterministic=True, implementation=name
        )
        for name in ("xla", "triton_interpret")
    }
    kernel = out["triton_interpret"]
    rows = jaxkv.sequences(prompts, None, kernel)
    scored = jaxkv.score(model, rows.tokens, rows.lengths, deterministic=True, implementation="triton_interpret")
    np.testing.assert_array_equal(np.where(rows.new, scored, 0), rows.logprobs)
    np.testing.assert_array_equal(kernel.tokens, out["xla"].tokens)
    np.testing.assert_allclose(kernel.logprobs, out["xla"].logprobs, atol=2e-5)


BEAM_PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 9, 7], [9]]


def search(prompts: Any, lengths: jax.Array | None = None, **options: Any) -> jaxkv.BeamSearchOutput:
    return jaxkv.beam_search(
        decoders.decoder(), prompts, lengths, num_beams=4, max_new_tokens=12, num_return_sequences=2, eos_token_id=[5, 6],
        deterministic=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def beams() -> jaxkv.BeamSearchOutput:
    return search(BEAM_PROMPTS)


@pytest.mark.parametrize(
    "changed",
    [{"page_size": 4, "prefill_chunk": 2}, slow({"page_size": 1}), slow({"page_size": 4, "num_pages": 43})],
    ids=str,
)
def test_pages_chunks_and_pool_do_not_show_in_beams(changed: dict[str, int], beams: jaxkv.BeamSearchOutput):
    out = search(BEAM_PROMPTS, **changed)
    np.testing.assert_array_equal(out.tokens, beams.tokens)
    np.testing.assert_array_equal(out.scores, beams.scores)


def test_a_prompt_alone_gives_the_same_beams_as_in_a_batch(beams: jaxkv.BeamSearchOutput):
    """Padded to the same width, so that one compiled program serves all three."""
    width = max(map(len, BEAM_PROMPTS))
    for i, prompt in enumerate(BEAM_PROMPTS):
        alone = search(jnp.asarray([prompt + [decoders.VOCAB - 1] * (width - len(prompt))]), jnp.asarray([len(prompt)]))
        np.testing.assert_array_equal(alone.tokens[0], beams.tokens[i])
        np.testing.assert_array_equal(alone.scores[0], beams.scores[i])


def test_score_takes_an_implementation_in_deterministic_mode_only():
    with pytest.raises(ValueError, match="goes with deterministic=True"):
        jaxkv.score(decoders.decoder(), np.ones((1, 4), np.int32), implementation="triton_interpret")
