"""The free list: which pages are free, how many table entries name each of the others, and which rows were refused pages.

    free_pages  [ 9 | 4 | 6 | ... ]     a stack: its first `num_free` entries are the free pages, the last of them on top
    ref_counts  [ 0 | 2 | 1 | ... ]     table entries that name each page; 0 for free pages and the null page

It knows page numbers, but neither what is in a page nor where in a row it stands.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.config import CacheConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreeList:
    """Free pages and reference counts of a pool.

    Attributes:
      ref_counts: i32[num_pages]; see above.
      free_pages, num_free: i32[num_pages] and i32[], the stack.
      out_of_pages: bool[seqs], rows that were refused pages, until `free` or `fork` gives them a new start.
    """

    ref_counts: Int[Array, " num_pages"]
    free_pages: Int[Array, " num_pages"]
    num_free: Int[Array, ""]
    out_of_pages: Bool[Array, " seqs"]

    @classmethod
    def create(cls, sizes: CacheConfig) -> "FreeList":
        """All pages free but the null page; page 1 on top."""
        stack = jnp.arange(sizes.num_pages - 1, -1, -1, dtype=jnp.int32)
        free = jnp.asarray(sizes.num_pages - 1, jnp.int32)
        return cls(jnp.zeros(sizes.num_pages, jnp.int32), stack, free, jnp.zeros(sizes.max_seqs, bool))

    @property
    def num_pages(self) -> int:
        """Pages in the pool, the null page included."""
        return self.ref_counts.shape[0]

    def take(
        self, need: Int[Array, " seqs"], width: int
    ) -> tuple[Int[Array, "seqs width"], Bool[Array, "seqs width"], "FreeList"]:
        """`need` pages for each row, at most `width`, from the top of the stack on: the pages, which entries are such, and what is
        left. There must be as many."""
        nth = jnp.arange(width, dtype=jnp.int32)[None, :]
        taken = nth < need[:, None]
        top = self.num_free - 1 - (jnp.cumsum(need, dtype=jnp.int32) - need)[:, None] - nth
        page = self.free_pages.at[jnp.where(taken, top, self.num_pages)].get(mode="fill", fill_value=0)
        counts = self.ref_counts.at[jnp.where(taken, page, self.num_pages)].set(1, mode="drop")
        left = self.num_free - jnp.sum(need, dtype=jnp.int32)
        return page, taken, dataclasses.replace(self, ref_counts=counts, num_free=left)

    def shared_less(self, page: Int[Array, " n"], where: Bool[Array, " n"]) -> "FreeList":
        """One reference less for pages that keep others."""
        counts = self.ref_counts.at[jnp.where(where, page, self.num_pages)].add(-1, mode="drop")
        return dataclasses.replace(self, ref_counts=counts)

    def exchange(self, gained: Int[Array, " n"], lost: Int[Array, " n"]) -> "FreeList":
        """References come and go; pages that nobody names any more return to the stack. `num_pages` stands for no page."""
        outside = self.num_pages
        counts = self.ref_counts.at[gained].add(1, mode="drop").at[lost].add(-1, mode="drop")
        # A page that several entries lose at once is freed once: by the last of the entries that name it.
        nth = jnp.arange(lost.shape[0], dtype=jnp.int32)
        last = jnp.zeros(outside, jnp.int32).at[lost].max(nth, mode="drop")
        freed = (lost != outside) & (counts.at[lost].get(mode="fill", fill_value=1) == 0)
        freed &= last.at[lost].get(mode="fill", fill_value=-1) == nth
        place = jnp.where(freed, self.num_free + jnp.cumsum(freed, dtype=jnp.int32) - 1, outside)
        return dataclasses.replace(
            self,
            ref_counts=counts,
            free_pages=self.free_pages.at[place].set(lost, mode="drop"),
            num_free=self.num_free + jnp.sum(freed, dtype=jnp.int32),
        )

    def freed_by_losing(self, lost: Int[Array, "..."]) -> Int[Array, ""]:
        """Pages that would return to the stack if so many entries went; `num_pages` stands for no page."""
        named = jnp.zeros(self.num_pages, jnp.int32).at[lost].add(1, mode="drop")
        return jnp.sum((named > 0) & (named == self.ref_counts), dtype=jnp.int32)

    def grown(self, num_pages: int) -> "FreeList":
        """The same pool with more pages, all of them free; outside jit."""
        extra, free = num_pages - self.num_pages, int(self.num_free)
        new = jnp.arange(num_pages - 1, self.num_pages - 1, -1, dtype=jnp.int32)
        stack = jnp.concatenate([new, self.free_pages[:free]])
        counts, stack = jnp.pad(self.ref_counts, (0, extra)), jnp.pad(stack, (0, num_pages - len(stack)))
        return FreeList(counts, stack, self.num_free + extra, self.out_of_pages)
