"""The ladder of sizes: never too small, and few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.programs import ladder


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(2, 4))
def test_a_rung_is_the_least_that_holds_the_size(size: int, first: int, growth: int) -> None:
    rung = ladder.rung(size, first, growth)
    assert rung >= size and rung >= first
    assert rung == first or rung // growth < size
    assert ladder.rung(rung, first, growth) == rung


@given(st.integers(1, 10**5), st.integers(0, 10**5))
def test_what_a_model_allows_is_never_exceeded_and_always_enough(tokens: int, more: int) -> None:
    most = tokens + more
    for room in (ladder.prompt(tokens, most), ladder.sequence(tokens, most), ladder.computed(tokens, most)):
        assert tokens <= room <= most


def test_a_session_of_short_texts_has_three_widths_and_one_room() -> None:
    lengths = range(1, 1025)
    assert {ladder.prompt(n, 8192) for n in lengths} == {16, 64, 1024}
    assert {ladder.sequence(n, 8192) for n in lengths} == {1024}
    assert {ladder.rows(n, 64) for n in range(1, 100)} == {1, 2, 4, 8, 16, 32, 64}
    assert {ladder.computed(n) for n in range(1, 129)} == {1, 16, 32, 64, 128}


def test_pools_that_are_small_have_one_size_and_none_is_larger_than_can_be_used() -> None:
    page = 2**20  # 128 pages of it are the smallest pool
    assert {ladder.pages(n, page, 1000) for n in range(2, 129)} == {128}
    assert ladder.pages(129, page, 1000) == 512
    assert ladder.pages(600, page, 1000) == 1000
    assert ladder.pages(5, page, 33) == 33
    assert ladder.pages(5, 2**40, 33) == 16


def test_whose_shapes_they_are() -> None:
    seen = {}

    def note(name: str):
        def f(x):
            seen[name] = ladder.inside_a_jit()
            return x

        return f

    with compilations() as programs:
        note("plain")(1.0)
    assert programs == [], "asking compiles nothing"
    one = jnp.float32(1.0)
    jax.grad(note("grad"))(one)
    jax.vmap(note("vmap"))(one[None])
    jax.jit(note("jit"))(one)
    jax.jit(jax.grad(note("grad in jit")))(one)
    jax.grad(jax.jit(note("jit in grad")))(one)
    jax.lax.fori_loop(0, 1, lambda i, x: note("loop")(x), one)
    inside = {"jit", "grad in jit", "jit in grad", "loop"}
    assert {name for name, flag in seen.items() if flag} == inside
    assert seen.keys() - inside == {"plain", "grad", "vmap"}


@pytest.mark.parametrize("values", [np.zeros(3), [1, 2], None, jnp.zeros(3)])
def test_one_device_is_not_several(values: object) -> None:
    assert not ladder.on_several_devices(values, {"a": values})
