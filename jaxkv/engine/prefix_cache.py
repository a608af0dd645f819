"""The prefix cache: whole pages of tokens that were computed before, found by what stands in them and before them.

A page's name is a SHA-256 hash of the name of the page before it and of its own token ids, so that equal names mean equal prefixes. The
first page's parent is a hash of the salt (texts under different salts share nothing) and of the weights' version.

    tokens   | system prompt ........ | question one ... |
    names    | h1 = H(root, tokens) | h2 = H(h1, tokens) | the last page is not full: it has no name

Who computes a page announces it first (`announce`), so that a second request with the same prefix can wait for it instead of computing it
again, and then says that it is there (`commit`).

Host only: no jax, no arrays. Source: vLLM's automatic prefix caching.
"""

import hashlib
import struct
from collections.abc import Hashable, Iterable, Sequence

from jaxkv.engine.page_pool import PagePool


def page_names(tokens: Sequence[int], page_size: int, root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """The names of the whole pages of a sequence of token ids.

    Args:
      tokens: token ids.
      page_size: tokens of a page.
      root: the parent of the first page, see `root_name`.
      known: names of the first pages, as far as they are known already.
    """
    names = list(known)
    pack = struct.Struct(f"<{page_size}q").pack
    for page in range(len(names), len(tokens) // page_size):
        parent = names[-1] if names else root
        names.append(hashlib.sha256(parent + pack(*tokens[page * page_size : (page + 1) * page_size])).digest())
    return names


def root_name(salt: str | None, version: int) -> bytes:
    """The parent of first pages: of texts under one salt (None is one of its own), computed by one version of the weights."""
    secret = b"" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(struct.pack("<q", version) + secret).digest()


class PrefixCache:
    """Which pages hold which prefixes.

    Args:
      num_pages: pages of the pool, the null page included.

    Attributes:
      pool: the pool, whose idle pages are the ones that this cache keeps.
      hits, queries: tokens that were found, and those that were looked for.
    """

    def __init__(self, num_pages: int):
        self.pool = PagePool(num_pages, self._forget)
        self.hits = self.queries = 0
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._announced: dict[bytes, Hashable] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def announce(self, names: Iterable[bytes], owner: Hashable) -> None:
        """Somebody is about to compute these pages; those that are known or announced already are left alone."""
        for name in names:
            if name not in self._page_of:
                self._announced.setdefault(name, owner)

    def announced(self, name: bytes) -> bool:
        """Whether somebody is about to compute this page."""
        return name in self._announced

    def withdraw(self, names: Iterable[bytes], owner: Hashable) -> None:
        """What was announced does not come after all."""
        for name in names:
            if self._announced.get(name) == owner:
                del self._announced[name]

    def commit(self, name: bytes, page: int) -> None:
        """A held page now holds this prefix. Where another page does already, that one stays the known one."""
        self._announced.pop(name, None)
        if name not in self._page_of:
            assert page not in self._name_of, f"page {page} holds another prefix already"
            self._page_of[name], self._name_of[page] = page, name
            self.pool.keep(page)

    def forget(self, pages: Iterable[int]) -> None:
        """What these pages hold is not to be relied on."""
        pages = [page for page in pages if page in self._name_of]
        for page in pages:
            self._forget(page)
        self.pool.drop(pages)

    def clear(self) -> None:
        """Forget all."""
        self.forget(list(self._name_of))
        self._announced.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._name_of.pop(page)]

    def check(self, tables: Iterable[Iterable[int]], owners: Iterable[Hashable]) -> None:
        """Raise AssertionError unless pool, names and announcements agree with each other and with the tables of all sequences."""
        self.pool.check(tables)
        assert {page: name for name, page in self._page_of.items()} == self._name_of, "names and pages disagree"
        assert self.pool._kept == set(self._name_of), "the pool keeps other pages than those that have a name"
        assert set(self._announced.values()) <= set(owners), "somebody who is gone has announced a page"
