"""Divisions of counts, beside Python's own."""

import jax.numpy as jnp
import pytest

from jaxkv.ops.integers import quotient, quotient_up, remainder


@pytest.mark.parametrize("by", [1, 2, 3, 16])
def test_they_are_pythons(by: int) -> None:
    counts = list(range(70))
    x = jnp.array(counts, jnp.int32)
    assert quotient(x, by).tolist() == [n // by for n in counts]
    assert quotient_up(x, by).tolist() == [-(-n // by) for n in counts]
    assert remainder(x, by).tolist() == [n % by for n in counts]
    for f in (quotient, quotient_up, remainder):
        assert f(x, by).dtype == jnp.int32


def test_below_zero_a_quotient_is_no_page_and_a_remainder_no_slot() -> None:
    x = jnp.array([-1, -17], jnp.int32)
    assert quotient(x, 16).tolist() == [0, -1]
    assert (remainder(x, 16) <= 0).all()
