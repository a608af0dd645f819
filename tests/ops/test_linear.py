"""`linear` adds a bias to `pallas_kernels.product` and hands its options on; the products themselves are tested with the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
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
