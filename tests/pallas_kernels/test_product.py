"""Every form of `product` against NumPy in float64, its derivatives, its batching, and bits that do not depend on the number of rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernel_calls import NATIVE

from pallas_kernels import product, product_op
from pallas_kernels.product_op import IMPLEMENTATIONS, best_form, best_tile_form
from pallas_kernels.row_tiles import TILE, in_row_tiles

# Accumulated in float32, rounded once: half a unit in the last place of the largest, and a little of the sum's own.
UNIT = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}


def arrays(rows: int, width: int, out: tuple[int, ...], dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows + width)
    return jnp.asarray(rng.standard_normal((rows, width)), dtype), jnp.asarray(rng.standard_normal((*out, width)), dtype)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def assert_close(got: jax.Array, want: np.ndarray, unit: float, case: str = "") -> None:
    np.testing.assert_allclose(wide(got), want, rtol=unit, atol=unit * np.abs(want).max(), err_msg=case)


ROWS = (1, 2, 3, 16, 17, 64, 65, 129)
BEST = ("xla", NATIVE)
"""What may be the best of a platform."""
NAMED = [NATIVE if name == "cpu" else name for name in IMPLEMENTATIONS]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("width", [1, 7, 576, product_op.LONG - 1, product_op.LONG])
@pytest.mark.parametrize("implementation", BEST)
def test_the_best_form_of_every_shape_gives_the_product(implementation: str, width: int, dtype: str):
    """All numbers of rows in one program, which saves most of the time to compile them."""
    x, weight = arrays(max(ROWS), width, (3, 5), dtype)
    modes, call = (False, True), functools.partial(product, implementation=implementation)
    run = jax.jit(lambda x, weight: [[call(x[:n], weight, deterministic=d) for d in modes] for n in ROWS])
    want = np.einsum("bk,ijk->bij", wide(x), wide(weight))
    for rows, results in zip(ROWS, run(x, weight)):
        for got, deterministic in zip(results, modes):
            assert got.dtype == x.dtype and got.shape == (rows, 3, 5)
            assert_close(got, want[:rows], UNIT[dtype], f"{rows} rows, deterministic={deterministic}")


SHAPES = ((1, 64, ()), (2, 576, (3, 5)), (3, 1, (2,)), (17, 7, (64,)), (33, 128, (2, 3, 1)), (129, 40, (4,)))


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("implementation", NAMED)
def test_every_form_asked_for_by_name_gives_the_product_or_says_why_not(implementation: str, dtype: str):
    def refused(rows: int, width: int, out: tuple[int, ...]) -> bool:
        if implementation == "tiles_side_by_side":
            return dtype != "float32" or out == ()
        return implementation == "sums_in_lanes" and (rows > 64 or width % (64 // rows) != 0)

    given = [arrays(*shape, dtype) for shape in SHAPES]
    for shape, (x, weight) in zip(SHAPES, given):
        if refused(*shape):
            with pytest.raises(NotImplementedError, match=f"{implementation}.*cannot run"):
                product(x, weight, implementation=implementation)
    taken = [pair for shape, pair in zip(SHAPES, given) if not refused(*shape)]
    results = jax.jit(lambda pairs: [product(*pair, implementation=implementation) for pair in pairs])(taken)
    assert len(results) == len(taken)
    for (x, weight), got in zip(taken, results):
        assert got.dtype == x.dtype and got.shape == (len(x), *weight.shape[:-1])
        assert_close(got, np.tensordot(wide(x), wide(weight), (1, -1)), UNIT[dtype], f"{x.shape}, {weight.shape}")


def test_a_wrong_argument_is_named_with_its_value():
    x, weight = arrays(3, 8, (4,), "float32")
    for change, message in (
        ({"x": x[0]}, r"x must be .*\(8,\)"),
        ({"weight": weight[:, :5]}, r"weight .*\(4, 5\)"),
        ({"weight": weight.astype(jnp.bfloat16)}, "one dtype.*bfloat16"),
        ({"x": x.astype(jnp.int32), "weight": weight.astype(jnp.int32)}, "one dtype.*int32"),
        ({"implementation": "triton"}, "one of .*'triton'"),
        ({"live": jnp.ones(2, bool)}, r"live must be bool\[rows = 3\].*\[2\]"),
        ({"live": jnp.ones(3)}, "live must be bool.*float32"),
        ({"implementation": "sums", "deterministic": True}, "deterministic=True takes .*'sums'"),
    ):
        with pytest.raises(ValueError, match=message):
            product(**({"x": x, "weight": weight} | change))
    with pytest.raises(NotImplementedError, match="at most 64 rows.*65 rows"):
        product(*arrays(65, 64, (4,), "float32"), implementation="sums_in_lanes")


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_in_it(shape: tuple[int, int, int]):
    rows, width, out = shape
    for deterministic in (False, True):
        got = product(jnp.ones((rows, width)), jnp.ones((out, width)), deterministic=deterministic)
        np.testing.assert_array_equal(got, np.zeros((rows, out), np.float32))


def test_the_best_form_goes_by_platform_rows_and_dtype(monkeypatch: pytest.MonkeyPatch):
    for platform in ("cuda", "rocm", "tpu", "other"):
        assert {best_form(platform, rows, 576, "float32") for rows in (1, 8, 129)} == {"weight_right"}
        assert best_tile_form(platform, 96, "float32") == "tiles_in_turn"
    assert best_form("cpu", 129, 576, "float32") == "weight_right"
    assert best_form("cpu", 128, 576, "float32") == best_form("cpu", 8, 2048, "float32") == "weight_left"
    assert best_form("cpu", 1, 576, "float32") == best_form("cpu", 3, 576, "bfloat16") == "weight_left"
    for fast, form, tiles in ((True, "sums", "tiles_side_by_side"), (False, "weight_left", "tiles_in_turn")):
        monkeypatch.setattr(product_op, "SUMS_ARE_FAST", fast)  # the machine, which these functions take no argument for
        assert best_form("cpu", 8, 576, "float32") == form and best_tile_form("cpu", 96, "float32") == tiles
    assert best_tile_form("cpu", 1, "float32") == best_tile_form("cpu", 96, "bfloat16") == "tiles_in_turn"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("implementation", BEST)
def test_live_rows_have_the_bits_that_they_have_without_the_others(implementation: str, deterministic: bool):
    x, weight = arrays(20, 48, (3, 5), "float32")
    live = jnp.arange(20) % 3 == 1
    run = functools.partial(product, deterministic=deterministic, implementation=implementation)
    want = jax.jit(run)(x, weight)
    np.testing.assert_array_equal(jax.jit(run)(x, weight, live=live)[live], want[live])
    batch = jax.vmap(lambda x, live: run(x, weight, live=live))(jnp.stack([x, x]), jnp.stack([live, ~live]))
    if deterministic or implementation == "cpu":
        np.testing.assert_array_equal(batch[0][live], want[live])
        np.testing.assert_array_equal(batch[1][~live], want[~live])
    shared = jax.vmap(lambda x: run(x, weight, live=live))(jnp.stack([x, x]))
    assert_close(shared[1][live], wide(want[live]), 1e-5)
    loss = lambda w: jnp.sum(jnp.sin(run(x, w, live=live))[live])
    exact = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.einsum("bk,ijk->bij", x, w))[live]))(weight)
    np.testing.assert_allclose(jax.grad(loss)(weight), exact, rtol=1e-4, atol=1e-4)


class TestDerivatives:
    @pytest.mark.parametrize(("rows", "width", "dtype"), [(1, 128, "bfloat16"), (2, 48, "bfloat16"), (9, 48, "float32")])
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("implementation", BEST)
    def test_are_those_of_the_product(self, implementation: str, rows: int, dtype: str, width: int, deterministic: bool):
        x, weight = arrays(rows, width, (11,), dtype)
        g = arrays(rows, 11, (), dtype)[0]
        ours = functools.partial(product, deterministic=deterministic, implementation=implementation)
        loss = lambda x, w: jnp.sum((ours(x, w) * g).astype(jnp.float32))
        want = (wide(g) @ wide(weight), wide(g).T @ wide(x))
        unit = 1e-5 if dtype == "float32" else 2**-6
        for got, exact in zip(jax.jit(jax.grad(loss, (0, 1)))(x, weight), want):
            assert got.dtype == x.dtype
            assert_close(got, exact, unit)
        value, forward = jax.jvp(ours, (x, weight), (x, weight))
        np.testing.assert_array_equal(value, ours(x, weight))
        np.testing.assert_allclose(wide(forward), 2 * wide(x) @ wide(weight).T, rtol=2**-6, atol=0.1)

    @pytest.mark.parametrize("implementation", NAMED)
    def test_are_the_same_for_every_form(self, implementation: str):
        x, weight = arrays(4, 64, (2, 3), "float32")
        run = jax.checkpoint(functools.partial(product, implementation=implementation))
        got = jax.grad(lambda x, w: jnp.sum(jnp.sin(run(x, w))), (0, 1))(x, weight)
        want = jax.grad(lambda x, w: jnp.sum(jnp.sin(jnp.einsum("bk,ijk->bij", x, w))), (0, 1))(x, weight)
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_of_second_order(self, deterministic: bool):
        x, weight = arrays(3, 8, (5,), "float32")
        ours = lambda x: jnp.sum(jnp.sin(product(x, weight, deterministic=deterministic)))
        got, want = (jax.hessian(f)(x) for f in (ours, lambda x: jnp.sum(jnp.sin(x @ weight.T))))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    def test_make_no_array_of_rows_by_out_by_in(self):
        x, weight = arrays(31, 257, (263,), "float32")
        program = jax.jit(jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1))).lower(x, weight).compile()
        assert program.memory_analysis().temp_size_in_bytes < 31 * 263 * 257 * 4 / 8


class TestBatching:
    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 1), (2, 2)])
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("implementation", ["sums", *BEST])
    def test_over_activations_weights_and_both(self, axes: tuple, implementation: str, deterministic: bool):
        if implementation == "sums" and deterministic:
            pytest.skip("sums have no such mode")
        x, weight = arrays(5, 32, (2, 3), "float32")
        batch = [y if axis is None else jnp.stack([y, 2 * y, -y], axis) for y, axis in zip((x, weight), axes)]
        run = functools.partial(product, implementation=implementation, deterministic=deterministic)
        got = jax.jit(jax.vmap(run, in_axes=axes))(*batch)
        single = [lambda i, y=y, axis=axis: y if axis is None else jnp.take(y, i, axis) for y, axis in zip(batch, axes)]
        for i in range(3):
            want = run(*(pick(i) for pick in single))
            if deterministic or implementation == "cpu":
                np.testing.assert_array_equal(got[i], want)
            assert_close(got[i], wide(want), 1e-5)

    def test_reverse_over_it(self):
        x, weight = arrays(4, 16, (3,), "float32")
        batch = jnp.stack([x, 2 * x])
        loss = lambda w, run: jnp.sum(jax.vmap(lambda y: jnp.sin(run(y, w)))(batch))
        for deterministic in (False, True):
            got = jax.grad(loss)(weight, functools.partial(product, deterministic=deterministic))
            np.testing.assert_allclose(got, jax.grad(loss)(weight, lambda x, w: x @ w.T), rtol=1e-4, atol=1e-4)
        per_example = jax.vmap(jax.grad(lambda w, y: jnp.sum(jnp.sin(product(y, w)))), (None, 0))(weight, batch)
        np.testing.assert_allclose(jnp.sum(per_example, 0), got, rtol=1e-4, atol=1e-4)

    def test_in_loops_and_branches(self):
        x, weight = arrays(4, 16, (16,), "float32")
        weight = weight / 4

        @jax.jit
        def run(x: jax.Array) -> jax.Array:
            x, _ = lax.scan(lambda x, _: (product(x, weight), None), x, None, length=2)
            x = lax.while_loop(lambda s: s[1] < 1, lambda s: (product(s[0], weight), s[1] + 1), (x, 0))[0]
            return lax.cond(x[0, 0] > jnp.inf, lambda x: x, lambda x: product(x, weight), x)

        assert_close(run(x), wide(x) @ np.linalg.matrix_power(wide(weight).T, 4), 1e-4)


@pytest.mark.usefixtures("optimized")
class TestBits:
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            *(
                ((out, width), "float32")
                for out, width in (
                    (960, 576),
                    (192, 1536),
                    (64, 48),
                    (96, 1536),
                    (100, 7),
                    (97, 48),
                    (1, 64),
                    (5, 1),
                    (11, 2048),
                )
            ),
            ((96, 1536), "bfloat16"),
            ((97, 48), "bfloat16"),
            ((97, 48), "float16"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("implementation", BEST)
    def test_a_row_has_the_same_in_any_number_of_tiles(self, implementation: str, shape: tuple[int, int], dtype: str):
        """Tiles stand side by side in one sum, and a single one alone in another: the library must cut both alike."""
        x, weight = arrays(130, shape[1], shape[:1], dtype)
        tiled = jax.jit(lambda x: product(x, weight, deterministic=True, implementation=implementation))
        alone = jnp.concatenate([tiled(x[i : i + 1]) for i in range(len(x))])
        for rows in (15, 16, 17, 33, 64, 130):
            np.testing.assert_array_equal(tiled(x[-rows:]), alone[-rows:])

    def test_float32_tiles_in_turn_keep_a_rows_too(self):
        """Where the best form is another, by name."""
        x, weight = arrays(40, 48, (64,), "float32")
        tiled = jax.jit(lambda x: product(x, weight, deterministic=True, implementation="tiles_in_turn"))
        whole = tiled(x)
        for rows in (1, 16, 17):
            np.testing.assert_array_equal(tiled(x[-rows:]), whole[-rows:])

    @pytest.mark.parametrize("implementation", BEST)
    def test_what_stands_around_a_tiled_product_does_not_change_them(self, implementation: str):
        """Factors before it, additions and activations behind it: fused with a sum, they would round it differently."""
        x, weight = arrays(33, 576, (96,), "float32")
        call = functools.partial(product, deterministic=True, implementation=implementation)
        plain = jax.jit(lambda x: call(x, weight))
        scaled = jnp.asarray(np.float32(x) * np.float32(0.3))
        for rows in (1, 16, 33):
            fused = jax.jit(lambda x: 1.7 * call(x * jnp.float32(0.3), weight) + 0.1)
            np.testing.assert_array_equal(fused(x[:rows]), jax.jit(lambda y: 1.7 * y + 0.1)(plain(scaled[:rows])))


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight[None]


def test_a_norm_sees_a_tile_taken_out_of_its_rows():
    """Regression: a tile's slice was fused with its sum where there were several tiles, and not where there was one; the bits of an
    RMS norm over 32 numbers differed (seen with the interpreted kernel beside it, not with the norm alone)."""
    weight = jnp.ones(48)
    for rows in (3, TILE, 3 * TILE):
        tiled = jax.jit(lambda x: in_row_tiles(rms_norm, (x,), (weight,)))
        text = tiled.lower(jnp.ones((rows, 48))).compile().as_text()
        sums = [part for part in text.split("\n\n") if re.search(r" reduce\(|ynn_fusion", part)]
        assert sums
        assert not any("dynamic-slice(" in part or "dynamic-update-slice(" in part for part in sums)


def test_rows_in_tiles_have_the_derivative_of_the_function():
    x, weight = arrays(TILE + 1, 8, (), "float32")
    got = jax.grad(lambda x, w: jnp.sum(jnp.sin(in_row_tiles(rms_norm, (x,), (w,)))), (0, 1))(x, weight)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(rms_norm(x, w))), (0, 1))(x, weight)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
