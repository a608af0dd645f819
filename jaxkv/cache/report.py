"""Host-side views of a cache's bookkeeping: the faults in it, and numbers about it. NumPy only; contents are never read."""

from typing import NamedTuple

import numpy as np


class Bookkeeping(NamedTuple):
    """The integers of a `PagedKVCache`, read back to the host; see there for their meaning. `page_bytes`: of one page, all layers."""

    block_tables: np.ndarray
    lengths: np.ndarray
    ref_counts: np.ndarray
    free_pages: np.ndarray
    num_free: int
    page_size: int
    page_bytes: int = 0

    def front(self, rows: int, pages: int) -> "Bookkeeping":
        """The first rows, with tables of so many pages each: the others hold nothing."""
        return self._replace(block_tables=self.block_tables[:rows, :pages], lengths=self.lengths[:rows])


class CacheStats(NamedTuple):
    """Numbers about a cache, on the host: counts of pages and tokens, and the share of reserved slots that are empty.

    `tokens` counts a shared token once per row; `slots_used` once. waste = 1 - slots_used / (pages_used * page_size). `bytes_total` is
    what the pool takes, null page included, of all layers and devices; `bytes_used` that of the pages in use.
    """

    pages_total: int
    pages_used: int
    pages_free: int
    pages_shared: int
    tokens: int
    slots_used: int
    waste: float
    bytes_total: int = 0
    bytes_used: int = 0


def find_faults(cache: Bookkeeping) -> list[str]:
    """Everything that is wrong with the bookkeeping, one sentence each; empty when nothing is."""
    tables, lengths, counts, num_free = cache.block_tables, cache.lengths, cache.ref_counts, cache.num_free
    num_pages = len(counts)
    if ((tables < 0) | (tables >= num_pages)).any():
        return [f"a block table names a page outside 0..{num_pages - 1}"]
    named = np.bincount(tables.reshape(-1), minlength=num_pages)
    named[0] = 0
    faults = [
        f"page {p} is named by {named[p]} table entries but counted {counts[p]} times" for p in np.flatnonzero(named != counts)
    ]
    if not 0 <= num_free < num_pages:
        return [*faults, f"num_free is {num_free} in a pool of {num_pages - 1} pages"]
    outside = (cache.free_pages[:num_free] < 0) | (cache.free_pages[:num_free] >= num_pages)
    if outside.any():
        return [*faults, f"the free stack names a page outside 0..{num_pages - 1}"]
    free = np.bincount(cache.free_pages[:num_free], minlength=num_pages)
    if free[0]:
        faults.append("the null page is on the free stack")
    faults += [f"page {p} is on the free stack {free[p]} times" for p in np.flatnonzero(free > 1)]
    faults += [f"page {p} is free and in a table" for p in np.flatnonzero((free > 0) & (named > 0))]
    faults += [f"page {p} leaks: neither free nor in a table" for p in np.flatnonzero((free + named)[1:] == 0) + 1]
    return faults + [fault for row in range(len(lengths)) for fault in _row_faults(cache, row)]


def _row_faults(cache: Bookkeeping, row: int) -> list[str]:
    table, length = cache.block_tables[row], cache.lengths[row]
    held, faults = int((table != 0).sum()), []
    if (table[:held] == 0).any():
        faults.append(f"row {row} has a gap in its table")
    if not 0 <= length <= held * cache.page_size:
        faults.append(f"row {row} holds {length} tokens in {held} pages of {cache.page_size}")
    empty = table[-(-length // cache.page_size) : held]
    return faults + [f"row {row} shares page {p}, in which it has no tokens" for p in empty[cache.ref_counts[empty] > 1]]


def page_fill(cache: Bookkeeping) -> np.ndarray:
    """Tokens in each page, int[num_pages], by the row that sees most of it; 0 for free pages and the null page."""
    fill = np.zeros(len(cache.ref_counts), np.int64)
    first = np.arange(cache.block_tables.shape[1]) * cache.page_size
    np.maximum.at(fill, cache.block_tables, np.clip(cache.lengths[:, None] - first[None, :], 0, cache.page_size))
    fill[0] = 0
    return fill


def cache_stats(cache: Bookkeeping) -> CacheStats:
    """Numbers about the pool; see `CacheStats`."""
    counts = cache.ref_counts
    used, slots = int((counts > 0).sum()), int(page_fill(cache).sum())
    return CacheStats(
        pages_total=len(counts) - 1,
        pages_used=used,
        pages_free=cache.num_free,
        pages_shared=int((counts > 1).sum()),
        tokens=int(cache.lengths.sum()),
        slots_used=slots,
        waste=1 - slots / (used * cache.page_size) if used else 0.0,
        bytes_total=len(counts) * cache.page_bytes,
        bytes_used=used * cache.page_bytes,
    )
