"""Every family by its name: `generate`'s log-probabilities are `score`'s to the last bit in deterministic mode.

tests/test_deterministic.py varies rows, pages, pools and mates over architectures; here each family runs once in each dtype,
with few rows, odd chunks, a pool that preempts and prompts padded on the other side of `score`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families.tiny_models import FAMILIES, tiny_model, tokens

import jaxkv

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("optimized")]

LENGTHS, NEW_TOKENS = (1, 8, 17, 3, 20), 8


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [x if x == "phi3" else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES])
def test_no_bit_between_rollout_and_score(case: str, dtype: str, tmp_path: Path) -> None:
    tiny_model(case).save_pretrained(tmp_path)
    model, _ = jaxkv.load(tmp_path, dtype=dtype)
    prompts = [tokens(length, seed=length).tolist() for length in LENGTHS]
    out = jaxkv.generate(
        model, prompts, max_new_tokens=NEW_TOKENS, max_seqs=3, page_size=4, prefill_chunk=7, num_pages=10, num_samples=2,
        sampling=jaxkv.Sampling(1.1), key=jax.random.key(3), deterministic=True, eos_token_id=(),
    )  # fmt: skip
    assert int(out.stats.preemptions) > 0, "this pool was meant to be too small for its rows"
    rows = jaxkv.sequences(prompts, None, out)
    scored = jaxkv.score(model, rows.tokens, rows.lengths, deterministic=True)
    assert np.abs(np.asarray(rows.logprobs)[np.asarray(rows.new)]).max() > 0
    np.testing.assert_array_equal(np.where(rows.new, scored, 0), rows.logprobs)
    wider = jnp.pad(jnp.asarray(rows.tokens), ((0, 0), (0, 7)))
    np.testing.assert_array_equal(
        jaxkv.score(model, wider, rows.lengths, deterministic=True)[:, : rows.tokens.shape[1]], scored
    )
