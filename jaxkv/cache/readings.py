"""What can be read off a cache: its sizes, its bookkeeping on the host, numbers about it, and a line of text. Nothing here changes one."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from jaxkv.cache.free_list import FreeList
from jaxkv.cache.pages import Pages
from jaxkv.cache.report import Bookkeeping, CacheStats, cache_stats, find_faults
from jaxkv.cache.tables import Tables
from jaxkv.sharding import within


class Readings:
    """The reading half of a `PagedKVCache`."""

    pages: tuple[Pages, ...]
    tables: Tables
    free_list: FreeList

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables.page_size

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.free_list.num_pages

    @property
    def max_seqs(self) -> int:
        """Rows."""
        return self.tables.max_seqs

    @property
    def pages_per_seq(self) -> int:
        """Width of the block tables."""
        return self.tables.pages_per_seq

    @property
    def block_tables(self) -> Int[Array, "seqs pages_per_seq"]:
        """Pages of each row in order of position, i32[seqs, pages_per_seq]."""
        return self.tables.block_tables

    @property
    def lengths(self) -> Int[Array, " seqs"]:
        """Tokens valid per row, i32[seqs]."""
        return self.tables.lengths

    @property
    def ref_counts(self) -> Int[Array, " num_pages"]:
        """Table entries that name each page, i32[num_pages]; 0 for free pages and the null page."""
        return self.free_list.ref_counts

    @property
    def num_free(self) -> Int[Array, ""]:
        """Free pages, i32[]."""
        return self.free_list.num_free

    @property
    def num_used(self) -> Int[Array, ""]:
        """Pages in use, i32[]."""
        return within(lambda free: self.num_pages - 1 - free, self.num_free)

    @property
    def out_of_pages(self) -> Bool[Array, " seqs"]:
        """Rows that an `allocate` could not serve, bool[seqs]; they keep what they had and take no more tokens until `free` or
        `fork` gives them a new start."""
        return self.free_list.out_of_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, those of all layers and devices together, scales included."""
        arrays = jax.tree.leaves(self.pages)
        return sum(x.size * x.dtype.itemsize // x.shape[0] for x in arrays)

    @property
    def donated(self) -> bool:
        """Whether the cache was given to a function that takes its memory over, as `extend` does; it is of no use then."""
        return any(
            isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()
            for x in jax.tree.leaves((self.tables, self.free_list, self.pages))
        )

    def alive(self) -> None:
        """Raise ValueError if the cache was donated."""
        if self.donated:
            raise ValueError("this cache was donated; use the one returned")

    def check(self) -> None:
        """Verify the bookkeeping on the host.

        Raises:
          ValueError: a page leaks, is freed twice or owned twice without a count, a table names a free page, ...; names all.
        """
        if faults := find_faults(self.bookkeeping()):
            raise ValueError("cache is inconsistent: " + "; ".join(faults))

    def stats(self) -> CacheStats:
        """Numbers about the cache, read back to the host."""
        return cache_stats(self.bookkeeping())

    def bookkeeping(self) -> Bookkeeping:
        """Tables, lengths, counts and the free stack, read back to the host; what `jaxkv.viz` draws.

        Raises:
          ValueError: the cache was donated.
        """
        self.alive()
        tables, lengths, counts, free = map(
            np.asarray, (self.block_tables, self.lengths, self.ref_counts, self.free_list.free_pages)
        )
        return Bookkeeping(tables, lengths, counts, free, int(self.num_free), self.page_size, self.page_bytes)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves((self.tables, self.free_list, self.pages))
        if not self.pages or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
            return "PagedKVCache(...)"  # jax builds caches of placeholders
        rows = f"{self.max_seqs} rows of up to {self.pages_per_seq * self.page_size} tokens"
        kind = f"{len(self.pages)} layers in {self.pages[0].k.dtype}"
        pool = f"{self.num_pages} pages of {self.page_size} tokens, {self.num_pages * self.page_bytes / 1e6:.4g} MB"
        if self.donated:
            return f"PagedKVCache({rows}, {kind}, {pool}) <donated>"
        return f"PagedKVCache({rows}, {kind}, {pool}, {_number(self.num_free)} free)"


def _number(x: Any) -> str:
    """A scalar, if it is known and is one."""
    return str(x) if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.shape == () else "some"
