"""Queries, keys and values split and rotated: every implementation against complex numbers in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import NATIVE
from kernel_oracle import DTYPES

import pallas_kernels
from pallas_kernels.cpu import library
from pallas_kernels.cpu.rotation import split_rotated_cpu

IMPLEMENTATIONS = ["xla", NATIVE]
ROUNDING = {"float32": 2**-22, "bfloat16": 2**-7, "float16": 2**-9}


def operands(tokens: int, kv_heads: int, q_per_kv: int, head_dim: int, half: int, dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(tokens + head_dim)
    angles = rng.uniform(0, 100, (tokens, half))
    qkv = rng.standard_normal((tokens, kv_heads, q_per_kv + 2, head_dim)).astype(DTYPES[dtype])
    return [jnp.asarray(qkv), *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))]


def turned(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> list[np.ndarray]:
    """q, k, v in float64: a pair of dimensions is a complex number, and turning it a multiplication."""
    x, half = np.asarray(qkv).astype(np.float64), cos.shape[1]
    turn = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None, None]
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    new = np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)
    return [new[:, :, :-2].reshape(x.shape[0], -1, x.shape[3]), new[:, :, -2], x[:, :, -1]]


def check(got: list, given: list[jax.Array], dtype: str) -> None:
    for name, a, b in zip("qkv", got, turned(*given)):
        assert a.dtype == given[0].dtype
        np.testing.assert_allclose(np.asarray(a).astype(np.float64), b, rtol=0, atol=8 * ROUNDING[dtype], err_msg=name)
    np.testing.assert_array_equal(np.asarray(got[2]), np.asarray(given[0])[:, :, -1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "q_per_kv", "head_dim", "half"),
    [(1, 3, 3, 64, 32), (5, 1, 1, 2, 1), (7, 2, 4, 80, 40), (3, 2, 1, 15, 3), (130, 3, 3, 64, 16), (2, 1, 9, 256, 128)],
)
def test_against_complex_numbers(implementation, dtype, tokens, kv_heads, q_per_kv, head_dim, half):
    given = operands(tokens, kv_heads, q_per_kv, head_dim, half, dtype)
    call = jax.jit(functools.partial(pallas_kernels.split_rotated, implementation=implementation))
    check(call(*given), given, dtype)


@pytest.mark.skipif(not library.available(), reason="needs the native CPU kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_target_gives_the_same_bits_for_any_number_of_tokens(dtype):
    """Every number is a sum of two products and nothing else: no kind of processor rounds it otherwise."""
    given = operands(130, 2, 3, 70, 33, dtype)
    loaded = library.load()
    assert isinstance(loaded, library.Library)
    want = [np.asarray(x) for x in split_rotated_cpu(*given, target="baseline")]
    check(want, given, dtype)
    for target in loaded.targets:
        for tokens in (130, 1, 7):
            for a, b in zip(split_rotated_cpu(*(x[:tokens] for x in given), target=target), want):
                assert np.asarray(a).tobytes() == b[:tokens].tobytes(), (target, tokens)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derivatives_vmap_and_loops(implementation):
    given = operands(4, 2, 2, 16, 6, "float32")
    call = functools.partial(pallas_kernels.split_rotated, implementation=implementation)
    weights = [jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32) for x in call(*given)]
    loss = lambda *a: sum(jnp.sum(x * x * w) for x, w in zip(call(*a), weights))
    plain = lambda *a: sum(jnp.sum(x * x * w) for x, w in zip(pallas_kernels.split_rotated(*a, implementation="xla"), weights))
    for a, b in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*given), jax.grad(plain, (0, 1, 2))(*given)):
        np.testing.assert_allclose(a, b, atol=1e-5)
    twice = jax.jit(jax.vmap(call, in_axes=(0, None, None)))(jnp.stack([given[0], -given[0]]), *given[1:])
    for a, b in zip(twice, call(*given)):
        np.testing.assert_allclose(a[0], b, atol=1e-6)
        np.testing.assert_allclose(a[1], -b, atol=1e-6)
    many = jax.jit(lambda *a: jax.lax.map(lambda _: jax.checkpoint(call)(*a), jnp.arange(2)))(*given)
    for a, b in zip(many, call(*given)):
        np.testing.assert_allclose(a[1], b, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: jnp.zeros((4, 2, 2, 16))}, "qkv must be"),
        ({0: jnp.zeros((4, 2, 4, 16), jnp.int32)}, "int32"),
        ({1: jnp.zeros((4, 9))}, "cos must be"),
        ({2: jnp.zeros((3, 6))}, "sin must be"),
        ({2: jnp.zeros((4, 6), jnp.bfloat16)}, "sin must be float32, got bfloat16"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    given = operands(4, 2, 2, 16, 6, "float32")
    with pytest.raises(ValueError, match=message):
        pallas_kernels.split_rotated(*(change.get(i, x) for i, x in enumerate(given)))
    with pytest.raises(ValueError, match="'triton'"):
        pallas_kernels.split_rotated(*given, implementation="triton")
