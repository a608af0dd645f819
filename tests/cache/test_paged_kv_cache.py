"""The paged cache, operation by operation. `test_kv_cache_properties.py` mixes them at random."""

import dataclasses
from collections.abc import Callable
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

import jaxkv
from jaxkv import PagedKVCache
from jaxkv.cache.pages import Pages, page_bytes


def make(num_pages: int = 12, page_size: int = 4, max_seqs: int = 4, max_seq_len: int = 32, **changes: Any) -> PagedKVCache:
    sizes = {"num_layers": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, **changes}
    config = decoders.config(rope=jaxkv.Rope(rotary_dim=2), **sizes)
    return PagedKVCache.create(config, num_pages=num_pages, page_size=page_size, max_seqs=max_seqs, max_seq_len=max_seq_len)


def counts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# Every operation under one jitted function: outside jit each call would compile its loops again.
allocate = jax.jit(PagedKVCache.allocate, static_argnames="max_tokens")
fork = jax.jit(PagedKVCache.fork)
free = jax.jit(PagedKVCache.free)
truncate = jax.jit(PagedKVCache.truncate)
needed = jax.jit(PagedKVCache.pages_needed)


@jax.jit
def _grow(cache: PagedKVCache, num_tokens: jax.Array) -> PagedKVCache:
    cache = cache.allocate(num_tokens)
    return cache.advance(jnp.where(cache.out_of_pages, 0, num_tokens))


def grow(cache: PagedKVCache, *num_tokens: int) -> PagedKVCache:
    """Allocate and count; contents stay what they are."""
    return _grow(cache, counts(*num_tokens))


def tables(cache: PagedKVCache) -> list[list[int]]:
    return [[int(p) for p in row if p] for row in np.asarray(cache.block_tables)]


def used(cache: PagedKVCache) -> int:
    return cache.num_pages - 1 - int(cache.num_free)


class TestCreate:
    def test_an_empty_cache(self):
        cache = make(num_pages=12, page_size=4, max_seqs=3, max_seq_len=30)
        assert (cache.num_pages, cache.page_size, cache.max_seqs, cache.pages_per_seq) == (12, 4, 3, 8)
        assert cache.pages[0].k.shape == cache.pages[1].v.shape == (12, 1, 4, 2)
        assert int(cache.num_free) == 11
        cache.check()
        assert cache.stats() == (11, 0, 11, 0, 0, 0, 0.0, 12 * cache.page_bytes, 0)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_dtype_is_the_models_unless_given(self, dtype: str):
        assert make(dtype=dtype).pages[0].k.dtype == dtype
        config = decoders.config(dtype=dtype)
        cache = PagedKVCache.create(config, num_pages=2, max_seqs=1, max_seq_len=8, dtype="float32")
        assert cache.pages[0].v.dtype == jnp.float32

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"page_size": 0}, "page_size must be an integer >= 1, got 0"),
            ({"max_seqs": 0}, "max_seqs must be an integer >= 1, got 0"),
            ({"max_seq_len": 0}, "max_seq_len must be an integer >= 1, got 0"),
            ({"num_pages": 1}, r"num_pages must be >= 2 .* got 1; one sequence of 32 tokens needs 8 pages"),
            ({"max_seq_len": 129}, "max_seq_len is 129, but the model allows 128 tokens"),
        ],
    )
    def test_bad_sizes_are_named(self, sizes: dict[str, int], message: str):
        with pytest.raises(ValueError, match=message):
            make(**sizes)

    def test_a_dtype_that_is_none_is_refused(self):
        with pytest.raises(ValueError, match="dtype must be one of .* got 'int4'"):
            PagedKVCache.create(decoders.config(), num_pages=4, max_seqs=1, max_seq_len=8, dtype="int4")


class TestAllocate:
    @pytest.mark.parametrize("page_size", [1, 3, 4, 16])
    @pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 16, 17])
    def test_takes_the_pages_the_tokens_need(self, page_size: int, tokens: int):
        cache = allocate(make(num_pages=40, page_size=page_size), counts(tokens, 0, 1, 0))
        cache.check()
        assert [len(t) for t in tables(cache)] == [-(-tokens // page_size), 0, 1, 0]
        assert cache.lengths.tolist() == [0, 0, 0, 0]

    def test_room_that_is_there_is_not_taken_again(self):
        cache = allocate(make(), counts(7, 0, 0, 0)).advance(counts(2, 0, 0, 0))
        again = allocate(cache, counts(6, 0, 0, 0))
        assert tables(again) == tables(cache)
        more = allocate(again, counts(7, 0, 0, 0))
        assert len(tables(more)[0]) == 3

    def test_all_or_nothing_per_row_and_rows_in_order(self):
        cache = allocate(make(num_pages=6), counts(8, 16, 9, 4))  # 2, 4, 3, 1 pages out of 5
        cache.check()
        assert [len(t) for t in tables(cache)] == [2, 0, 3, 0]
        assert cache.out_of_pages.tolist() == [False, True, False, True]

    def test_a_row_without_tokens_is_never_refused(self):
        cache = allocate(make(num_pages=2), counts(5, 0, 4, 0))
        assert cache.out_of_pages.tolist() == [True, False, False, False]

    def test_longer_than_the_table_is_refused(self):
        cache = allocate(make(num_pages=30, max_seq_len=8), counts(9, 8, 0, 0))
        assert cache.out_of_pages.tolist() == [True, False, False, False]
        assert [len(t) for t in tables(cache)] == [0, 2, 0, 0]

    def test_out_of_pages_sticks_until_the_row_is_freed(self):
        cache = grow(make(num_pages=4), 4, 4, 4, 4)
        assert cache.out_of_pages.tolist() == [False, False, False, True]
        cache = free(cache, counts(0))
        assert cache.out_of_pages.tolist() == [False, False, False, True]
        cache = grow(cache, 0, 0, 0, 1)  # there is a page, but tokens were lost: the row takes no more
        assert cache.lengths.tolist() == [0, 4, 4, 0]
        assert cache.out_of_pages[3]
        cache = truncate(cache, counts(9, 9, 9, 9))
        assert cache.out_of_pages[3], "truncate must not hide that a row lost tokens"
        cache = grow(free(cache, counts(3)), 0, 0, 0, 1)
        assert cache.lengths.tolist() == [0, 4, 4, 1]
        assert not cache.out_of_pages.any()
        cache.check()

    def test_fork_gives_a_stuck_row_a_new_start(self):
        cache = grow(make(num_pages=3), 4, 5, 0, 0)
        assert cache.out_of_pages.tolist() == [False, True, False, False]
        cache = fork(cache, 0, 1)
        assert not cache.out_of_pages.any()
        assert grow(cache, 0, 1, 0, 0).lengths.tolist() == [4, 5, 0, 0]

    @pytest.mark.parametrize("max_tokens", [1, 4, 5, 8])
    def test_a_bound_on_the_tokens_changes_nothing(self, max_tokens: int):
        start = fork(grow(make(num_pages=30), 3, 6, 0, 0), counts(0, 1), counts(2, 3))
        n = counts(max_tokens, 1, max_tokens, max_tokens)
        bounded, free = allocate(start, n, max_tokens=max_tokens), allocate(start, n)
        bounded.check()
        assert tables(bounded) == tables(free)


class TestCopyOnWrite:
    @staticmethod
    def filled(cache: PagedKVCache) -> PagedKVCache:
        """Every slot of the pool has a value of its own, in both arrays of both layers."""
        k = [jnp.arange(p.k.size, dtype=jnp.float32).reshape(p.k.shape) + 1000 * i for i, p in enumerate(cache.pages)]
        return cache.with_pages(tuple(Pages(x, -x) for x in k))

    @staticmethod
    def contents(cache: PagedKVCache, row: int) -> np.ndarray:
        length = int(cache.lengths[row])
        position = np.arange(length)
        page = np.asarray(cache.block_tables)[row, position // cache.page_size]
        return np.stack([np.asarray(x)[page, :, position % cache.page_size] for x in jax.tree.leaves(cache.pages)])

    def test_a_shared_partly_filled_page_is_copied_in_every_layer(self):
        cache = fork(self.filled(grow(make(), 6, 0, 0, 0)), 0, 1)
        before = self.contents(cache, 0)
        cache = allocate(cache, counts(0, 1, 0, 0))
        cache.check()
        (a, b), (c, d) = tables(cache)[:2]
        assert a == c
        assert b != d
        np.testing.assert_array_equal(self.contents(cache, 0), before)
        np.testing.assert_array_equal(self.contents(cache, 1), before)

    def test_a_full_shared_page_is_not_copied(self):
        cache = allocate(fork(grow(make(), 8, 0, 0, 0), 0, 1), counts(1, 1, 0, 0))
        cache.check()
        a, b = tables(cache)[:2]
        assert a[:2] == b[:2]
        assert a[2] != b[2]
        assert used(cache) == 4

    def test_when_all_owners_write_the_last_one_keeps_the_page(self):
        cache = fork(self.filled(grow(make(), 6, 0, 0, 0)), counts(0, 0, 0), counts(1, 2, 3))
        before, shared = self.contents(cache, 0), tables(cache)[0][1]
        assert needed(cache, counts(1, 1, 1, 1)).tolist() == [1, 1, 1, 0]
        cache = allocate(cache, counts(1, 1, 1, 1))
        cache.check()
        assert tables(cache)[3][1] == shared
        assert len({t[1] for t in tables(cache)}) == 4
        assert used(cache) == 5
        for row in range(4):
            np.testing.assert_array_equal(self.contents(cache, row), before)

    def test_owners_that_do_not_write_keep_the_page(self):
        cache = fork(grow(make(), 6, 0, 0, 0), counts(0, 0, 0), counts(1, 2, 3))
        shared = tables(cache)[0][1]
        cache = allocate(cache, counts(1, 0, 1, 0))
        cache.check()
        assert tables(cache)[1][1] == tables(cache)[3][1] == shared
        assert len({t[1] for t in tables(cache)}) == 3

    def test_a_copy_counts_as_a_page_and_may_be_refused(self):
        cache = fork(grow(make(num_pages=4), 6, 0, 0, 0), counts(0, 0, 0), counts(1, 2, 3))  # 1 page is free
        cache = allocate(cache, counts(1, 1, 1, 0))
        cache.check()
        assert cache.out_of_pages.tolist() == [False, True, True, False]
        assert int(cache.num_free) == 0

    def test_a_refused_row_still_owns_its_share(self):
        """Rows 0 and 1 share a page and row 0 is refused: row 1 must then copy, or it would write into row 0's tokens."""
        cache = fork(grow(make(num_pages=4), 6, 0, 0, 0), 0, 1)
        cache = allocate(cache, counts(9, 1, 0, 0))
        cache.check()
        assert cache.out_of_pages.tolist() == [True, False, False, False]
        assert tables(cache)[0][1] != tables(cache)[1][1]

    def test_pages_needed_is_what_allocate_takes(self):
        cache = fork(grow(make(num_pages=40), 6, 5, 0, 0), 0, 2)
        n = counts(3, 7, 1, 4)
        assert used(allocate(cache, n)) - used(cache) == int(needed(cache, n).sum())


class TestFork:
    def test_takes_no_page(self):
        cache = grow(make(), 6, 3, 0, 0)
        forked = fork(cache, counts(0, 1), counts(2, 3))
        forked.check()
        assert used(forked) == used(cache) == 3
        assert tables(forked)[2] == tables(forked)[0]
        assert forked.lengths.tolist() == [6, 3, 6, 3]

    @pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 2, 1, 0], [1, 2, 3, 0], [0, 0, 0, 0], [2, 2, 3, 3], [0, 1, 2, 3]])
    def test_any_order_at_once(self, order: list[int]):
        cache = grow(make(num_pages=20), 1, 5, 9, 13)
        forked = fork(cache, counts(*order), jnp.arange(4))
        forked.check()
        assert tables(forked) == [tables(cache)[i] for i in order]
        assert forked.lengths.tolist() == [cache.lengths.tolist()[i] for i in order]

    def test_what_the_destination_held_is_freed(self):
        cache = fork(grow(make(), 4, 12, 0, 0), 0, 1)
        cache.check()
        assert used(cache) == 1

    def test_onto_itself_keeps_everything(self):
        cache = grow(make(), 6, 3, 0, 0)
        forked = fork(cache, counts(0, 1), counts(0, 1))
        forked.check()
        assert tables(forked) == tables(cache)
        assert int(forked.ref_counts.max()) == 1

    def test_pages_without_tokens_are_not_shared(self):
        cache = fork(allocate(grow(make(), 4, 0, 0, 0), counts(8, 0, 0, 0)), 0, 1)
        cache.check()
        assert [len(t) for t in tables(cache)] == [3, 1, 0, 0]

    @pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (9, 3), (99, 3), (-5, 0)])
    def test_only_the_first_tokens(self, length: int, pages: int):
        cache = fork(grow(make(), 9, 0, 0, 0), 0, 1, lengths=counts(length))
        cache.check()
        assert len(tables(cache)[1]) == pages
        assert int(cache.lengths[1]) == min(max(length, 0), 9)

    def test_numbers_out_of_range_are_ignored(self):
        cache = grow(make(), 6, 3, 0, 0)
        forked = fork(cache, counts(0, -1, 7, 1, 0), counts(-1, 2, 3, 4, 3))
        forked.check()
        assert tables(forked) == [*tables(cache)[:2], [], tables(cache)[0]]

    def test_inside_jit_with_traced_rows(self):
        cache = grow(make(), 6, 3, 0, 0)
        forked = jax.jit(lambda c, s, d: fork(c, s, d))(cache, jnp.int32(0), jnp.int32(3))
        assert forked.lengths.tolist() == [6, 3, 0, 6]


class TestFree:
    @pytest.mark.parametrize("rows", [jnp.asarray([True, False, True, False]), counts(0, 2), counts(2, 0, 2, -1, 4, 99)])
    def test_by_mask_or_number(self, rows: jax.Array):
        cache = free(grow(make(), 6, 3, 5, 1), rows)
        cache.check()
        assert cache.lengths.tolist() == [0, 3, 0, 1]
        assert used(cache) == 2

    def test_shared_pages_stay_until_the_last_owner_goes(self):
        cache = fork(grow(make(), 6, 0, 0, 0), counts(0, 0), counts(1, 2))
        for row, left in ((1, 2), (0, 2), (2, 0)):
            assert int(cache.pages_freed_by(jnp.arange(4) == row)) == (2 if left == 0 else 0)
            cache = free(cache, counts(row))
            cache.check()
            assert used(cache) == left

    def test_all_owners_at_once_free_a_page_once(self):
        cache = fork(grow(make(), 6, 0, 0, 0), counts(0, 0, 0), counts(1, 2, 3))
        assert int(cache.pages_freed_by(jnp.ones(4, bool))) == 2
        cache = free(cache, jnp.ones(4, bool))
        cache.check()
        assert used(cache) == 0

    def test_twice_is_once(self):
        cache = free(free(grow(make(), 6, 3, 0, 0), counts(0)), counts(0))
        cache.check()
        assert used(cache) == 1

    def test_pages_are_used_again(self):
        cache = make(num_pages=4)
        for _ in range(5):
            cache = grow(free(cache, jnp.ones(4, bool)), 12, 0, 0, 0)
            cache.check()
            assert cache.lengths.tolist() == [12, 0, 0, 0]


class TestTruncate:
    def test_frees_pages_without_tokens(self):
        cache = truncate(allocate(grow(make(num_pages=20), 9, 9, 9, 9), counts(0, 0, 0, 9)), counts(5, 4, 0, 99))
        cache.check()
        assert cache.lengths.tolist() == [5, 4, 0, 9]
        assert [len(t) for t in tables(cache)] == [2, 1, 0, 3]

    def test_negative_is_zero(self):
        cache = truncate(grow(make(), 9, 5, 0, 0), counts(-3, 9, 0, 0))
        cache.check()
        assert cache.lengths.tolist() == [0, 5, 0, 0]

    def test_a_shared_page_cut_in_two_places(self):
        """Two rows share a page and hold different parts of it: whoever writes first must copy."""
        cache = truncate(fork(grow(make(), 4, 0, 0, 0), 0, 1), counts(4, 2, 0, 0))
        cache.check()
        cache = allocate(cache, counts(0, 1, 0, 0))
        cache.check()
        assert tables(cache)[0] != tables(cache)[1]


class TestStats:
    def test_counts_shared_tokens_once_per_row_and_slots_once(self):
        cache = fork(grow(make(), 6, 1, 0, 0), 0, 2)
        stats = cache.stats()
        assert (stats.pages_total, stats.pages_used, stats.pages_free, stats.pages_shared) == (11, 3, 8, 2)
        assert (stats.tokens, stats.slots_used) == (13, 7)
        assert stats.waste == pytest.approx(1 - 7 / 12)

    def test_a_page_cut_in_two_places_is_filled_by_the_longer(self):
        cache = fork(grow(make(), 6, 0, 0, 0), 0, 1, lengths=counts(5))
        assert cache.stats().slots_used == 6


def _set(name: str, index: Any, value: Any) -> Callable[[PagedKVCache], PagedKVCache]:
    owner = "tables" if name in ("block_tables", "lengths") else "free_list"

    def change(cache: PagedKVCache) -> PagedKVCache:
        old = getattr(cache, owner)
        return dataclasses.replace(
            cache, **{owner: dataclasses.replace(old, **{name: getattr(old, name).at[index].set(value)})}
        )

    return change


class TestCheck:
    """The cache under test: rows 0 and 2 share pages 1 and 2 (6 tokens), row 1 has page 3 (3 tokens); 4 to 11 are free."""

    @staticmethod
    def healthy() -> PagedKVCache:
        cache = fork(grow(make(), 6, 3, 0, 0), 0, 2)
        cache.check()
        assert tables(cache) == [[1, 2], [3], [1, 2], []]
        return cache

    @pytest.mark.parametrize(
        ("plant", "message"),
        [
            (_set("ref_counts", 1, 1), "page 1 is named by 2 table entries but counted 1 times"),
            (_set("ref_counts", 3, 2), "page 3 is named by 1 table entries but counted 2 times"),
            (_set("ref_counts", 7, 1), "page 7 is named by 0 table entries but counted 1 times"),
            (_set("ref_counts", 0, 1), "page 0 is named by 0 table entries but counted 1 times"),
            (_set("num_free", (), 7), "page 4 leaks: neither free nor in a table"),
            (_set("num_free", (), 9), "page 3 is free and in a table"),
            (_set("num_free", (), -1), "num_free is -1 in a pool of 11 pages"),
            (_set("num_free", (), 12), "num_free is 12 in a pool of 11 pages"),
            (_set("free_pages", 0, 5), "page 5 is on the free stack 2 times"),
            (_set("free_pages", 0, 5), "page 11 leaks"),
            (_set("free_pages", 0, 0), "the null page is on the free stack"),
            (_set("free_pages", 0, -4), "free stack names a page outside"),
            (_set("free_pages", 0, 12), "free stack names a page outside"),
            (_set("block_tables", (1, 0), 8), "page 8 is free and in a table"),
            (_set("block_tables", (1, 0), 8), "page 3 leaks"),
            (_set("block_tables", (1, 1), 1), "page 1 is named by 3 table entries but counted 2 times"),
            (_set("block_tables", (1, 0), 12), "a block table names a page outside 0..11"),
            (_set("block_tables", (1, 0), -1), "a block table names a page outside 0..11"),
            (_set("block_tables", (0, 0), 0), "row 0 has a gap in its table"),
            (_set("lengths", 1, 5), "row 1 holds 5 tokens in 1 pages of 4"),
            (_set("lengths", 3, 1), "row 3 holds 1 tokens in 0 pages"),
            (_set("lengths", 1, -1), "row 1 holds -1 tokens"),
            (_set("lengths", 0, 3), "row 0 shares page 2, in which it has no tokens"),
        ],
    )
    def test_planted_corruption_is_found(self, plant: Callable[[PagedKVCache], PagedKVCache], message: str):
        with pytest.raises(ValueError, match=message):
            plant(self.healthy()).check()

    def test_all_faults_are_told_at_once(self):
        cache = _set("lengths", 1, 5)(_set("ref_counts", 7, 1)(self.healthy()))
        with pytest.raises(ValueError, match="page 7 .*; row 1 holds 5"):
            cache.check()


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_bytes_of_a_page_before_there_is_one(dtype: str | None) -> None:
    """What pools are sized by is what they take. Old fault: the scales of quantized pages were not counted."""
    config = decoders.config()
    cache = PagedKVCache.create(config, num_pages=3, page_size=4, max_seqs=1, max_seq_len=8, dtype=dtype)
    assert page_bytes((config,), 4, dtype) == cache.page_bytes
    assert page_bytes((config, config), 4, dtype) == 2 * cache.page_bytes


def test_outside_jit_a_second_call_compiles_nothing():
    """Their loops would be compiled anew at every call if the methods were not jitted."""
    cache = make()

    def turn(cache: PagedKVCache) -> PagedKVCache:
        grown = cache.allocate(counts(3, 0, 5, 0)).advance(counts(3, 0, 5, 0))
        return grown.free(jnp.array([0, 2]))

    with compilations() as first:
        cache = turn(cache)
    with compilations() as later:
        cache = turn(turn(cache))
    assert first
    assert later == []
    cache.check()
