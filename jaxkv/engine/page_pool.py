"""The pool of pages: which are free, how many sequences hold each, and which idle ones are worth keeping.

    free     nobody holds it, its contents are worth nothing
    idle     nobody holds it, but its contents may be asked for again (the prefix cache knows what they are)
    held     so many sequences have it in their tables

Page 0 is the null page and belongs to nobody. A page that is taken comes from the free ones, then from the idle ones, the one that has been
idle for longest first; whoever kept it is told, since its contents go.

Host only: no jax, no arrays.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class PagePool:
    """Counts of all pages.

    Args:
      num_pages: pages of the pool, the null page included, >= 1.
      on_evict: told the number of an idle page whose contents are given up.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]):
        if num_pages < 1:
            raise ValueError(f"a pool has at least its null page, got num_pages={num_pages}")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: page 1 is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one that has been idle for longest stands first
        self._kept: set[int] = set()

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        """Pages that there are to hold, all together."""
        return self.num_pages - 1

    @property
    def held(self) -> int:
        """Pages that sequences hold."""
        return self.capacity - self.available

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds: sharing them makes as many less available."""
        return sum(page in self._idle for page in pages)

    def take(self, count: int) -> list[int] | None:
        """So many pages for one sequence, or None where there are not enough: all or nothing."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._kept.discard(page)
                self._on_evict(page)
            self._counts[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more sequence holds these pages; idle ones are held again."""
        for page in pages:
            self._idle.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less holds these pages; of those that nobody holds then, the ones given first are given up first."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is released more often than it was taken"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The contents of a held page are worth keeping when nobody holds it any more."""
        assert self._counts[page] > 0, f"page {page} is held by nobody"
        self._kept.add(page)

    def drop(self, pages: Iterable[int]) -> None:
        """The contents of these pages are worth nothing any more."""
        for page in pages:
            self._kept.discard(page)
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the counts are those of the tables given, and every page is exactly one of free, idle and held.

        Args:
          tables: the pages of every sequence.
        """
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        assert counts == self._counts, "the counts are not those of the tables"
        assert counts[0] == 0, "somebody holds the null page"
        places = [*self._free, *self._idle, *(page for page, count in enumerate(counts) if count)]
        assert sorted(places) == list(range(1, self.num_pages)), "a page is in two places, or in none"
        assert self._idle.keys() <= self._kept, "a page is idle whose contents nobody wants"
        assert not self._kept.intersection(self._free), "a free page is kept"
