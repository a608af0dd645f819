"""Under `jax_enable_x64` every array keeps its 32 bits or less, and every result its bits.

Before, sums, index arrays and literals without a dtype became 64 bits wide there, and the state of a loop changed its type.
"""

import re
from collections.abc import Callable
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

PROMPTS = decoders.random_prompts(0, [9, 7, 13])
TOKENS = np.asarray(decoders.random_tokens(1, 2, 7))
SAMPLING = jaxkv.Sampling(0.8, 10, 0.9, 0.01)
COMMON: dict[str, Any] = {"max_new_tokens": 5, "max_seqs": 2, "page_size": 4}


def greedy(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.generate(model, PROMPTS, **COMMON, eos_token_id=5, deterministic=True)


def sampled(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    """A pool so small that rows are preempted, samples that share pages."""
    options = {**COMMON, "max_seqs": 3, "page_size": 2, "num_pages": 10, "num_samples": 2}
    out = jaxkv.generate(model, PROMPTS, **options, sampling=SAMPLING, key=jax.random.key(1))
    assert isinstance(out.tokens, jax.core.Tracer) or int(out.stats.preemptions) > 0
    return out


def by_ngrams(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.generate(model, PROMPTS, **COMMON, speculative=jaxkv.NGram(2))


def by_draft(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.generate(model, PROMPTS, **COMMON, speculative=jaxkv.Draft(draft, 2))


def quantized(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.generate(model, PROMPTS, **COMMON, cache_dtype="int8")


def naive(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.generate_naive(model, PROMPTS, max_new_tokens=5, sampling=SAMPLING, key=jax.random.key(1))


def beams(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.beam_search(model, PROMPTS, num_beams=2, max_new_tokens=4, page_size=4, eos_token_id=3)


def extended(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    cache = jaxkv.PagedKVCache.create(model.config, num_pages=20, page_size=4, max_seqs=2, max_seq_len=20)
    logits, cache = jaxkv.extend(model, cache, TOKENS, np.array([7, 4], np.int32))
    return logits, cache.fork(0, 1).free(0).lengths


def scored(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jax.value_and_grad(lambda m: -jnp.mean(jaxkv.score(m, TOKENS, sampling=SAMPLING)))(model)


def scored_in_tiles(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jax.value_and_grad(lambda m: -jnp.mean(jaxkv.score(m, TOKENS, deterministic=True, remat=True)))(model)


def forward(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    logits = model(jnp.asarray(TOKENS))
    return logits, jaxkv.sample(logits[:, -1], SAMPLING.per_row(2), jax.random.split(jax.random.key(2), 2))


def mismatched(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.mismatch(model, PROMPTS, None, jaxkv.generate(model, PROMPTS, **COMMON))


PROGRAMS = (
    greedy, sampled, by_ngrams, by_draft, quantized, naive, beams, extended, scored, scored_in_tiles, forward, mismatched,
)  # fmt: skip


def streamed(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return list(jaxkv.stream(model, PROMPTS, **COMMON))


def by_transformers_names(model: jaxkv.Decoder, draft: jaxkv.Decoder) -> Any:
    return jaxkv.CausalLM(model).generate(TOKENS, max_new_tokens=3)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_no_array_becomes_64_bits_wide(program: Callable) -> None:
    """Scalars may: the compiler folds them. Read from the lowered program, kernels included."""
    with jax.enable_x64(True):
        text = jax.jit(program).lower(decoders.decoder("sandwich"), decoders.decoder(seed=3)).as_text()
    text = re.sub(r"dense<[^>]*> : tensor<[^>]*>", "", text)  # attributes and constants
    assert not re.findall(r".*tensor<(?:\d+x)+(?:i64|f64)>.*", text)[:3]


SLOW = [
    pytest.param(f, marks=pytest.mark.slow) for f in (greedy, by_draft, beams, naive, scored_in_tiles, by_transformers_names)
]


@pytest.mark.parametrize("program", [sampled, scored, streamed, *SLOW], ids=lambda f: f.__name__)
def test_results_are_those_without_it(program: Callable) -> None:
    models = decoders.decoder(num_layers=1), decoders.decoder(num_layers=1, seed=3)
    plain = program(*models)
    with jax.enable_x64(True):
        wide = program(*models)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(wide), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)
