"""The pool of pages and the prefix cache, without a device: counts, names, eviction."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxkv.engine.page_pool import PagePool
from jaxkv.engine.prefix_cache import PrefixCache, page_names, root_name

ROOT = root_name(None, 0)


def test_taking_is_all_or_nothing_and_never_the_null_page():
    pool = PagePool(4, on_evict=lambda page: None)
    assert pool.take(4) is None
    assert pool.available == 3
    assert sorted(pool.take(3) or ()) == [1, 2, 3]
    assert pool.take(1) is None
    assert pool.take(0) == []


def test_idle_pages_are_given_up_in_the_order_in_which_they_were_released():
    gone = []
    pool = PagePool(4, on_evict=gone.append)
    pages = pool.take(3) or []
    for page in pages[:2]:
        pool.keep(page)
    pool.release(reversed(pages))
    assert (pool.available, pool.held) == (3, 0)
    assert pool.take(1) == [pages[2]]  # free, so nothing is lost
    assert not gone
    pool.take(1)
    assert gone == [pages[1]]  # released before pages[0]


def test_shared_pages_are_held_until_the_last_one_lets_go():
    pool = PagePool(3, on_evict=lambda page: None)
    pages = pool.take(1) or []
    pool.share(pages)
    pool.release(pages)
    assert pool.held == 1
    pool.release(pages)
    assert pool.held == 0
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


def test_names_depend_on_everything_before_on_the_salt_and_on_the_weights():
    tokens = list(range(12))
    names = page_names(tokens, 4, ROOT)
    assert len(names) == 3
    assert page_names(tokens[:11], 4, ROOT) == names[:2]  # the last page is not full
    assert page_names(tokens, 4, ROOT, names[:1]) == names
    assert page_names([99, *tokens[1:]], 4, ROOT)[1] != names[1]
    roots = {root_name(None, 0), root_name("", 0), root_name("a", 0), root_name("a", 1)}
    assert len(roots) == 4


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9])
def test_whole_pages_only(length):
    assert len(page_names(list(range(length)), 4, ROOT)) == length // 4


class _Model:
    """What pool and cache should do, as sets: the oracle of the property test."""

    def __init__(self, num_pages):
        self.cache = PrefixCache(num_pages)
        self.tables: list[tuple[list[int], list[bytes]]] = []

    def admit(self, tokens):
        names = page_names(tokens, 2, ROOT)
        found = self.cache.find(names)
        for name, page in zip(names, found):
            assert self.contents[page] == name, "a page is found that holds something else"
        need = -(-len(tokens) // 2) - len(found)
        if need + self.cache.pool.idle(found) > self.cache.pool.available:
            return
        self.cache.pool.share(found)
        more = self.cache.pool.take(need)
        assert more is not None
        for page in more:
            self.contents.pop(page, None)
        pages = [*found, *more]
        for page, name in list(zip(pages, names))[len(found) :]:
            self.contents[page] = name
            self.cache.commit(name, page)
        self.tables.append((pages, names))

    contents: dict[int, bytes]


@hypothesis.given(
    st.integers(2, 12),
    st.lists(st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(0, 9)), max_size=60),
)
@hypothesis.settings(max_examples=60)
def test_pool_and_cache_agree_whatever_comes(num_pages, actions):
    """Lists are prompts that come, numbers sequences that end; a page that is found always holds what its name says."""
    model = _Model(num_pages)
    model.contents = {}
    for action in actions:
        if isinstance(action, list):
            model.admit(action)
        elif model.tables:
            pages, _ = model.tables.pop(action % len(model.tables))
            model.cache.pool.release(reversed(pages))
        model.cache.check([pages for pages, _ in model.tables], [])
    model.cache.clear()
    for pages, _ in model.tables:
        model.cache.pool.release(pages)
    assert model.cache.pool.available == num_pages - 1
    assert len(model.cache) == 0
