"""A model whose parameters were cast by hand: they own the dtype, and the configuration, the cache and files agree with them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv

CONFIG = jaxkv.ModelConfig("llama", 64, 32, 1, 2, 1, 16, 32, 64, rope=jaxkv.Rope(rotary_dim=16))
SIZES = {"num_pages": 4, "page_size": 4, "max_seqs": 1, "max_seq_len": 8}


def cast(model: jaxkv.Decoder, dtype: str, *, matrices_only: bool = False) -> jaxkv.Decoder:
    return jax.tree.map(lambda a: a if matrices_only and a.ndim == 1 else a.astype(dtype), model)


@pytest.fixture(scope="module")
def model() -> jaxkv.Decoder:
    return jaxkv.Decoder(CONFIG, rngs=nnx.Rngs(0))


def test_configuration_and_cache_have_the_parameters_dtype(model) -> None:
    """Regression: the configuration kept the old one, and so had the cache."""
    assert model.config == CONFIG
    half = cast(model, "bfloat16")
    assert half.config.dtype == "bfloat16"
    assert cast(half, "float32").config == CONFIG
    assert jaxkv.PagedKVCache.create(half.config, **SIZES).pages[0].k.dtype == jnp.bfloat16


@pytest.mark.parametrize("matrices_only", [False, True])
def test_it_is_saved_as_it_is(model, matrices_only: bool, tmp_path: Path) -> None:
    """Regression: `save` asserted the dtype of the configuration the model was built from."""
    half = cast(model, "bfloat16", matrices_only=matrices_only)
    jaxkv.save(half, tmp_path)
    back, _ = jaxkv.load(tmp_path)
    assert back.config == half.config
    for ours, theirs in zip(jax.tree.leaves(half), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_it_generates_like_the_loaded_one(model, tmp_path: Path) -> None:
    jaxkv.save(model, tmp_path)
    loaded, _ = jaxkv.load(tmp_path, dtype="bfloat16")
    expected, got = (jaxkv.generate(m, [[1, 2]], max_new_tokens=3).logprobs for m in (loaded, cast(model, "bfloat16")))
    np.testing.assert_array_equal(got, expected)


def test_a_cast_within_jit_needs_no_second_configuration(model) -> None:
    @jax.jit
    def pages(model: jaxkv.Decoder) -> jax.Array:
        return jaxkv.PagedKVCache.create(cast(model, "float16").config, **SIZES).pages[0].k

    assert pages(model).dtype == jnp.float16
    assert jax.tree.map(lambda a: a.shape, model).config == CONFIG  # leaves that are no arrays say nothing


def test_a_dtype_that_no_model_runs_in_is_named(model) -> None:
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'int8'"):
        _ = cast(model, "int8").config
