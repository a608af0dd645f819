"""`linear` adds a bias to `pallas_kernels.product` and hands its options on; the products themselves are tested with the kernels."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from jaxkv.ops.linear import linear


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"implementation": "weight_left"}], ids=str)
def test_a_bias_is_added_to_the_product(options: dict):
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 8), (2, 5, 8), (2, 5)))
    y = pallas_kernels.product(x, weight, **options)
    np.testing.assert_array_equal(linear(x, weight, **options), y)
    np.testing.assert_array_equal(linear(x, weight, bias, **options), y + bias[None])


def test_options_reach_the_product():
    with pytest.raises(ValueError, match="deterministic=True takes .*'sums'"):
        linear(jnp.ones((2, 4)), jnp.ones((3, 4)), deterministic=True, implementation="sums")
