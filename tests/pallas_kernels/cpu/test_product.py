"""Native products for every kind of processor that this one can act as: against NumPy in float64, and bit by bit against themselves."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import needs_library, targets

from pallas_kernels.cpu.product import product_cpu

pytestmark = needs_library

UNIT = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}
"""Relative to the largest of a case: float32's own rounding of a sum, half a unit in the last place of the others."""


@functools.cache
def compiled(target: str):
    return jax.jit(functools.partial(product_cpu, target=target))


def arrays(seed: int, rows: int, width: int, outputs: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((rows, width)), dtype), jnp.asarray(rng.standard_normal((outputs, width)), dtype)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def check(x: jax.Array, weight: jax.Array, got: jax.Array) -> None:
    want, unit = wide(x) @ wide(weight).T, UNIT[x.dtype.name]
    np.testing.assert_allclose(wide(got), want, rtol=unit, atol=unit * np.abs(want).max())


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("target", targets())
class TestEveryTarget:
    @pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 32, 33, 63, 65, 576, 1543])
    def test_gives_the_product(self, target: str, dtype: str, width: int):
        """Rows and outputs on both sides of a tile, widths on both sides of a vector of every size."""
        for rows, outputs in ((1, 1), (1, 67), (2, 16), (5, 33), (7, 130), (13, 3), (29, 18)):
            x, weight = arrays(rows, rows, width, outputs, dtype)
            check(x, weight, compiled(target)(x, weight))

    def test_keeps_a_rows_bits_in_any_number_of_rows(self, target: str, dtype: str):
        """Tails of tiles, tiles widened once and in registers, one block of rows and several, one thread and more."""
        for width, outputs in ((576, 100), (70, 5), (2050, 33)):
            x, weight = arrays(0, 400, width, outputs, dtype)
            whole = np.asarray(compiled(target)(x, weight))
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 33, 100):
                np.testing.assert_array_equal(compiled(target)(x[-rows:], weight), whole[-rows:], err_msg=f"{rows} rows")

    def test_keeps_a_columns_bits_wherever_it_stands(self, target: str, dtype: str):
        x, weight = arrays(1, 9, 200, 150, dtype)
        whole = np.asarray(compiled(target)(x, weight))
        for first in (1, 3, 17, 149):
            np.testing.assert_array_equal(compiled(target)(x, weight[first:]), whole[:, first:], err_msg=f"from {first} on")

    def test_reads_numbers_of_every_kind(self, target: str, dtype: str):
        """One row for each value times one, which is exact: infinities, NaN, the largest and the least; and no row sees another's."""
        kind = jnp.finfo(dtype)
        values = [1.0, -0.5, float(kind.max), float(kind.min), float(kind.smallest_normal), np.inf, -np.inf, np.nan, 0.0]
        x = jnp.zeros((len(values), 37), dtype).at[:, 35].set(jnp.asarray(values, dtype))
        for place in (x, jnp.zeros((len(values), 64), dtype).at[:, 33].set(jnp.asarray(values, dtype))):
            got = compiled(target)(place, jnp.ones((3, place.shape[1]), dtype))
            np.testing.assert_array_equal(wide(got), np.tile(np.asarray(jnp.asarray(values, dtype), np.float64)[:, None], 3))


@pytest.mark.parametrize("target", targets())
def test_denormal_numbers_count_alike_in_every_thread(target: str):
    """Regression by design: XLA's threads take them for zero, others do not, and bits would depend on who ran a task."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(np.where(rng.random((64, 576)) < 0.5, 1e-40, 1.0), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((400, 576)), jnp.float32)
    whole = compiled(target)(x, weight)
    for row in (0, 31, 63):
        np.testing.assert_array_equal(compiled(target)(x[row : row + 1], weight)[0], whole[row])


def test_float16_beyond_its_range_is_infinite():
    x = jnp.full((2, 40), 300, jnp.float16)
    for target in targets():
        assert np.isposinf(np.asarray(compiled(target)(x, x), np.float32)).all(), target


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("target", targets())
def test_rows_that_are_not_live_are_left_out_and_change_no_bit(target: str, dtype: str):
    """Live ones in front, behind, scattered, none and all; what stands in the others is not even read."""
    rng = np.random.default_rng(3)
    x, weight = arrays(0, 70, 576, 50, dtype)
    whole = np.asarray(compiled(target)(x, weight))
    number = np.arange(70)
    for live in (number < 5, number >= 60, rng.random(70) < 0.5, number < 0, number >= 0, number == 33):
        given = jnp.where(jnp.asarray(live)[:, None], x, jnp.nan)
        got = np.asarray(compiled(target)(given, weight, jnp.asarray(live)))
        np.testing.assert_array_equal(got, np.where(live[:, None], whole, 0).astype(whole.dtype))


SHAPE = st.tuples(st.integers(1, 80), st.integers(1, 260), st.integers(1, 140))


def fuzz(shape: tuple[int, int, int], dtype: str, target: str, seed: int) -> None:
    x, weight = arrays(seed, *shape, dtype)
    got = compiled(target)(x, weight)
    check(x, weight, got)
    row = seed % shape[0]
    np.testing.assert_array_equal(compiled(target)(x[row : row + 1], weight)[0], got[row])


GIVEN = {"dtype": st.sampled_from(sorted(UNIT)), "target": st.sampled_from(targets()), "seed": st.integers(0, 2**16)}


@hypothesis.settings(max_examples=40)
@hypothesis.given(shape=SHAPE, **GIVEN)
def test_any_shape(shape: tuple[int, int, int], dtype: str, target: str, seed: int):
    fuzz(shape, dtype, target, seed)


@pytest.mark.slow
@hypothesis.settings(max_examples=2000)
@hypothesis.given(shape=SHAPE, **GIVEN)
def test_two_thousand_shapes(shape: tuple[int, int, int], dtype: str, target: str, seed: int):
    fuzz(shape, dtype, target, seed)
