"""The native writer of pages: in place in loops, its bits those of XLA's form, and a pool that somebody else reads stays as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from kernel_oracle import DTYPES
from needs import needs_library

import pallas_kernels

pytestmark = needs_library

QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
SHAPE = (513, 2, 16, 64)


def pools_of(dtype: str, shape: tuple[int, ...] = SHAPE) -> list[jax.ShapeDtypeStruct]:
    scales = [jax.ShapeDtypeStruct(shape[:3], "float32")] * (2 if dtype in QUANTIZED else 0)
    return [jax.ShapeDtypeStruct(shape, DTYPES[dtype])] * 2 + scales


def write(pools, k, v, pages, offsets, implementation="cpu"):
    scales = dict(zip(("k_scales", "v_scales"), pools[2:]))
    return pallas_kernels.write_pages(*pools[:2], k, v, pages, offsets, implementation=implementation, **scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *QUANTIZED])
def test_a_loop_writes_into_donated_pools_without_a_copy(dtype):
    """The compiled program, whose loop also attends over what it has written, holds no copy of a pool and no room for one."""

    def decode(pools, q, new, tables, lengths):
        def step(state):
            i, pools, q = state
            pools = write(pools, new, new, tables[:, 0], (lengths + i) % 16)
            scales = dict(zip(("k_scales", "v_scales"), pools[2:]))
            return (
                i + 1,
                pools,
                q + pallas_kernels.paged_attention(q, *pools[:2], tables, lengths, implementation="cpu", **scales),
            )

        return lax.while_loop(lambda state: state[0] < 4, step, (0, pools, q))[1:]

    wide = jnp.dtype(DTYPES["float32" if dtype in QUANTIZED else dtype])
    array, ints = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    given = (tuple(pools_of(dtype)), array((8, 6, 64), wide), array((8, 2, 64), wide), ints((8, 4)), ints((8,)))
    compiled = jax.jit(decode, donate_argnums=0).lower(*given).compile()
    size = int(np.prod(SHAPE)) * jnp.dtype(DTYPES[dtype]).itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < 0.1 * size
    text, pool = compiled.as_text(), ",".join(map(str, SHAPE))
    assert "jaxkv_write_pages" in text and "jaxkv_attention" in text
    assert not [
        line for line in text.splitlines() if f"[{pool}]" in line.partition(" = ")[2].partition(" ")[0] and " copy(" in line
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *QUANTIZED])
@pytest.mark.parametrize("new", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 7, 80])
def test_bits_are_those_of_xla(dtype, new, head_dim):
    rng = np.random.default_rng(0)
    shape, tokens = (9, 3, 5, head_dim), 40
    pools = [jnp.asarray(rng.integers(0, 3, p.shape)).astype(p.dtype) for p in pools_of(dtype, shape)]
    slots = rng.permutation(9 * 5)[:tokens]
    pages, offsets = slots // 5, slots % 5
    pages[3], pages[4], offsets[5], offsets[6] = -1, 9, 5, -1  # dropped, as is all that goes to page 0
    k, v = (rng.standard_normal((tokens, 3, head_dim)) * 10.0 ** rng.integers(-6, 6, (tokens, 3, 1)) for _ in range(2))
    k[7] = 0
    k, v = (jnp.asarray(x, DTYPES[new]) for x in (k, v))
    ints = [jnp.asarray(x, jnp.int32) for x in (pages, offsets)]
    got, want = (jax.jit(functools.partial(write, implementation=name))(tuple(pools), k, v, *ints) for name in ("cpu", "xla"))
    for a, b in zip(got, want):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert np.asarray(got[0])[0].tobytes() == np.asarray(pools[0])[0].tobytes(), "the null page is not written"


def test_a_pool_that_is_read_later_stays_as_it_was():
    """Without donation, or where the old pool is used after the write, the write goes into a copy."""
    pool, new = jnp.zeros((4, 1, 2, 8)), jnp.ones((1, 1, 8))
    at = jnp.ones(1, jnp.int32)
    old, written = jax.jit(lambda pool: (pool + 0, write((pool, pool), new, new, at, at)[0]))(pool)
    assert not np.asarray(pool).any() and not np.asarray(old).any()
    assert np.asarray(written)[1, 0, 1].all() and np.asarray(written).sum() == 8


def test_two_pools_that_are_one_array_become_two():
    """k and v pages may be the same zeros before the first write."""
    pool = jnp.zeros((4, 1, 2, 8))
    at = jnp.ones(1, jnp.int32)
    k, v = jax.jit(lambda pool: write((pool, pool), jnp.ones((1, 1, 8)), jnp.full((1, 1, 8), 2.0), at, at))(pool)
    assert np.asarray(k).sum() == 8 and np.asarray(v).sum() == 16
