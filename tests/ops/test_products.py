"""`linear` against NumPy in float64, on both sides of every choice it makes among forms of a product."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.model.layers import normalise
from jaxkv.ops import products
from jaxkv.ops.numerics import Numerics
from jaxkv.ops.products import linear

EXACT = Numerics(deterministic=True)


def arrays(rows: int, width: int, out: tuple[int, ...], dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + width)
    return jnp.asarray(rng.standard_normal((rows, width)), dtype), jnp.asarray(rng.standard_normal((*out, width)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [1, 7, 576, products.LONG - 1, products.LONG])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 2 * products.TILE, 2 * products.TILE + 1])
def test_every_form_gives_the_product(rows: int, width: int, dtype: str):
    x, weight = arrays(rows, width, (3, 5), dtype)
    want = np.einsum("bk,ijk->bij", *(np.asarray(a, np.float64) for a in (x, weight)))
    # Accumulated in float32, rounded once: half a unit in the last place of the largest, and a little of the sum's own.
    unit = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    for deterministic in (False, True):
        got = linear(x, weight, None, Numerics(None, deterministic))
        assert got.dtype == x.dtype and got.shape == (rows, 3, 5)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=unit, atol=unit * np.abs(want).max())


@pytest.mark.parametrize("width", [48, 128])
@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (2, "float32"), (9, "float32"), (40, "float32")])
def test_derivatives_are_those_of_the_product(rows: int, dtype: str, width: int):
    x, weight = arrays(rows, width, (11,), dtype)
    g = arrays(rows, 11, (), dtype)[0]
    plain = lambda x, w: jnp.sum((jnp.einsum("bk,nk->bn", x, w, precision="highest") * g).astype(jnp.float32))
    ours = lambda x, w: jnp.sum((linear(x, w) * g).astype(jnp.float32))
    wide = [np.asarray(a, np.float64) for a in (x, weight, g)]
    want = (wide[2] @ wide[1], wide[2].T @ wide[0])
    for got, exact, same in zip(jax.grad(ours, (0, 1))(x, weight), want, jax.grad(plain, (0, 1))(x, weight)):
        assert got.dtype == same.dtype
        unit = 1e-5 if dtype == "float32" else 2**-6
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=unit, atol=unit * np.abs(exact).max())
    _, forward = jax.jvp(linear, (x, weight), (x, weight))
    np.testing.assert_allclose(np.asarray(forward, np.float64), 2 * wide[0] @ wide[1].T, rtol=2**-6, atol=0.1)


def test_the_gradient_of_few_rows_makes_no_array_of_rows_by_out_by_in():
    x, weight = arrays(31, 257, (263,), "float32")
    program = jax.jit(jax.grad(lambda x, w: jnp.sum(linear(x, w) ** 2), (0, 1))).lower(x, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < 31 * 263 * 257 * 4 / 8


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(
            ((out, width), "float32")
            for out, width in ((960, 576), (192, 1536), (64, 48), (96, 1536), (100, 7), (97, 48), (1, 64), (5, 1), (11, 2048))
        ),
        ((96, 1536), "bfloat16"),
        ((97, 48), "bfloat16"),
        ((97, 48), "float16"),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_number_of_tiles(shape: tuple[int, int], dtype: str):
    """Tiles stand side by side in one sum, and a single one alone in another: the library must cut both alike."""
    x, weight = arrays(130, shape[1], shape[:1], dtype)
    tiled = jax.jit(lambda x: linear(x, weight, None, EXACT))
    alone = jnp.concatenate([tiled(x[i : i + 1]) for i in range(len(x))])
    for rows in (15, 16, 17, 32, 33, 48, 64, 128, 130):
        np.testing.assert_array_equal(tiled(x[-rows:]), alone[-rows:])


@pytest.mark.usefixtures("optimized")
def test_what_stands_around_a_tiled_product_does_not_change_its_bits():
    """Factors before it, additions and activations behind it: fused with a sum, they would round it differently."""
    x, weight = arrays(33, 576, (96,), "float32")
    plain = jax.jit(lambda x: linear(x, weight, None, EXACT))
    scaled = jnp.asarray(np.float32(x) * np.float32(0.3))
    for rows in (1, 16, 33):
        fused = jax.jit(lambda x: 1.7 * linear(x * jnp.float32(0.3), weight, None, EXACT) + 0.1)
        np.testing.assert_array_equal(fused(x[:rows]), jax.jit(lambda y: 1.7 * y + 0.1)(plain(scaled[:rows])))


def test_a_norm_sees_a_tile_taken_out_of_its_rows():
    """Regression: a tile's slice was fused with its sum where there were several tiles, and not where there was one; the bits of an
    RMS norm over 32 numbers differed (seen with the interpreted kernel beside it, not with the norm alone)."""
    norm = functools.partial(normalise, "rms", 1e-5, False)
    weight = jnp.ones(48)
    for rows in (3, products.TILE, 3 * products.TILE):
        tiled = jax.jit(lambda x: products.in_row_tiles(norm, (x,), (weight,)))
        text = tiled.lower(jnp.ones((rows, 48))).compile().as_text()
        sums = [part for part in text.split("\n\n") if re.search(r" reduce\(|ynn_fusion", part)]
        assert sums
        assert not any("dynamic-slice(" in part or "dynamic-update-slice(" in part for part in sums)
