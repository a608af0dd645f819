"""New keys and values land in their slots and nowhere else, quantized where the pages are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import NATIVE
from kernel_oracle import DTYPES

import pallas_kernels

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
PAGES, OFFSETS = (3, 0, 1, 5, 99, -1, 2), (1, 0, 3, 2, 0, 1, 7)  # 0, out of range, and an offset beyond the page: dropped
LIVE = (0, 2, 3)


def write(implementation, dtype, head_dim=80):
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.integers(0, 3, (6, 2, 4, head_dim))).astype(DTYPES[dtype])
    scales = jnp.ones((6, 2, 4), jnp.float32) if dtype in QUANTIZED else None
    k, v = (jnp.asarray(rng.standard_normal((len(PAGES), 2, head_dim)), jnp.float32) for _ in range(2))
    k = k.at[3].set(0.0)
    call = jax.jit(lambda *a: pallas_kernels.write_pages(*a[:6], k_scales=a[6], v_scales=a[7], implementation=implementation))
    index = lambda x: jnp.asarray(x, jnp.int32)
    result = call(pool, pool, k, v, index(PAGES), index(OFFSETS), scales, scales)
    return [np.asarray(x) for x in (pool, k, v)], [np.asarray(x) for x in result]


@pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *QUANTIZED])
def test_values_land_in_their_slots_only(implementation, dtype):
    (pool, k, v), result = write(implementation, dtype)
    for i, new in enumerate((k, v)):
        after = result[i].astype(np.float32)
        untouched = np.ones(pool.shape[:3], bool)
        untouched[0] = False  # the null page may hold anything
        for token in LIVE:
            page, offset = PAGES[token], OFFSETS[token]
            untouched[page, :, offset] = False
            got = after[page, :, offset]
            if dtype in QUANTIZED:
                scale = result[2 + i][page, :, offset]
                peak = np.abs(new[token]).max(-1)
                got = got * scale[:, None]
                # int8 rounds to half a step; e4m3 keeps 3 bits of mantissa, e5m2 keeps 2
                error = {"int8": 0.51 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[dtype] * np.maximum(peak, 1e-9)
            else:
                error = {"float32": 0, "bfloat16": 2**-7, "float16": 2**-9}[dtype] * np.abs(new[token]).max(-1)
            assert (np.abs(got - new[token]).max(-1) <= error).all(), (i, token)
        assert (result[i][untouched] == pool[untouched]).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_implementations_agree(dtype):
    _, want = write("xla", dtype, head_dim=64)
    _, got = write("triton_interpret", dtype, head_dim=64)
    for a, b in zip(want, got):
        a, b = a[1:].astype(np.float32), b[1:].astype(np.float32)
        assert (a != b).mean() < 0.01, "they differ in ties of rounding at most"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_the_pool_is_not_copied_on_cpu(dtype):
    """Regression: XLA on CPU widened a bfloat16 or fp8 pool at every write.

    Where the dtype still goes through its bits (see `WIDENED_ON_CPU`) one pool-sized temporary each is the price.
    """
    from pallas_kernels.write_pages_xla import WIDENED_ON_CPU

    shape = (513, 2, 16, 64)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    pool, new, index = array(shape, dtype), array((8, 2, 64), "float32"), array((8,), "int32")
    scales = array(shape[:3], "float32") if dtype in QUANTIZED else None
    call = lambda *a: pallas_kernels.write_pages(*a[:6], k_scales=a[6], v_scales=a[7])
    compiled = jax.jit(call, donate_argnums=(0, 1, 6, 7)).lower(pool, pool, new, new, index, index, scales, scales).compile()
    memory, size = compiled.memory_analysis(), 513 * 2 * 16 * 64 * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < (2.1 * size if dtype in WIDENED_ON_CPU else 0.1 * size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_attention_never_copies_the_pool_on_cpu(dtype):
    """Regression: a bfloat16 gather became a float32 one, with the whole pool converted at every call."""
    pages = jax.ShapeDtypeStruct((4097, 2, 16, 64), jnp.dtype(dtype))
    scales = jax.ShapeDtypeStruct((4097, 2, 16), jnp.float32) if dtype in QUANTIZED else None
    q = jax.ShapeDtypeStruct((2, 4, 64), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    tables, lengths = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    call = lambda q, k, v, t, n, ks, vs: pallas_kernels.paged_attention(q, k, v, t, n, k_scales=ks, v_scales=vs)
    memory = jax.jit(call).lower(q, pages, pages, tables, lengths, scales, scales).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4097 * 2 * 16 * 64 * jnp.dtype(dtype).itemsize / 8
