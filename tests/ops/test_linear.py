"""`linear` adds a bias to `pallas_kernels.product` and hands its options on; the products themselves are tested with the kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import decoder

import jaxkv
import pallas_kernels
from jaxkv.model.segments import Segment
from jaxkv.ops.linear import linear
from jaxkv.ops.numerics import Numerics


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("implementation", [None, "xla", "triton_interpret"])
def test_a_bias_is_added_to_the_product(implementation: str | None, deterministic: bool):
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 8), (2, 5, 8), (2, 5)))
    numerics = Numerics(implementation, deterministic)
    y = pallas_kernels.product(x, weight, deterministic=deterministic, implementation=numerics.product)
    np.testing.assert_array_equal(linear(x, weight, None, numerics), y)
    np.testing.assert_array_equal(linear(x, weight, bias, numerics), y + bias[None])


@pytest.mark.parametrize(
    ("implementation", "asked"), [(None, None), ("xla", "xla"), ("cpu", "cpu"), ("triton", "xla"), ("mosaic_interpret", "xla")]
)
def test_numerics_reach_the_product(implementation: str | None, asked: str | None):
    """A name that products have no kernel for gives XLA's, and the mode is handed on: both stand in the traced program."""
    numerics = Numerics(implementation, deterministic=True)
    traced = str(jax.make_jaxpr(lambda x, w: linear(x, w, None, numerics))(jnp.ones((2, 4)), jnp.ones((3, 4))))
    assert "deterministic=True" in traced
    assert f"implementation={asked}" in traced


def test_rows_that_are_not_live_are_left_out_of_every_product_of_a_step():
    """A step's products know which of its tokens are real: those of a decode row that rests, and of a chunk half full, cost nothing."""
    model = decoder()
    cache = jaxkv.PagedKVCache.create(model.config, num_pages=9, max_seqs=3, max_seq_len=32).allocate(jnp.array([4, 0, 2]))
    cache = cache.advance(jnp.array([4, 0, 2]))
    segment = Segment(None, cache.lengths, jnp.array([4, 0, 2]), queries=4)
    tokens = jnp.arange(12, dtype=jnp.int32)
    run = lambda tokens: model.forward_paged(tokens, (segment,), cache.tables, cache.pages, Numerics())[0]
    program = str(jax.make_jaxpr(run)(tokens))
    products = re.findall(r"= product\[[^\]]*\] (.*)", program)
    assert len(products) >= 2 and all(len(operands.split()) == 3 for operands in products), products
    live = np.array([True] * 4 + [False] * 4 + [True] * 2 + [False] * 2)
    others = jnp.where(jnp.asarray(live), tokens, 7)
    np.testing.assert_array_equal(jax.jit(run)(tokens)[live], jax.jit(run)(others)[live])
