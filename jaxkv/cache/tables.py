"""Block tables: which page holds which positions of which row, and how many positions are valid.

    block_tables[row] -> [ 7 | 3 | 9 | 0 | 0 ]     entry i names the page of positions i * page_size ... (i + 1) * page_size - 1

What a row's entries mean:

    index < lengths // page_size          full pages, any number of rows may share them
    the next, if lengths % page_size      partly filled, may be shared: copied before the first write (copy-on-write)
    further entries != 0                  allocated, still empty, never shared
    entries == 0                          nothing

Tables know positions and page numbers. Whether a page is free or shared, the free list knows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.config import CacheConfig
from jaxkv.ops.integers import quotient, quotient_up, remainder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """The block tables of all rows.

    Attributes:
      block_tables: i32[seqs, pages_per_seq], pages of each row in order of position.
      lengths: i32[seqs], tokens valid per row.
      page_size: tokens a page holds.
    """

    block_tables: Int[Array, "seqs pages_per_seq"]
    lengths: Int[Array, " seqs"]
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(cls, sizes: CacheConfig) -> "Tables":
        """Rows without tokens."""
        tables = jnp.zeros((sizes.max_seqs, sizes.pages_per_seq), jnp.int32)
        return cls(tables, jnp.zeros(sizes.max_seqs, jnp.int32), sizes.page_size)

    @property
    def max_seqs(self) -> int:
        """Rows."""
        return self.lengths.shape[0]

    @property
    def pages_per_seq(self) -> int:
        """Width of the block tables."""
        return self.block_tables.shape[1]

    def pages_held(self) -> Int[Array, " seqs"]:
        """Pages in each row's table."""
        return jnp.sum(self.block_tables != 0, axis=1, dtype=jnp.int32)

    def pages_missing(self, num_tokens: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
        """Pages that each row lacks for so many more tokens."""
        return jnp.maximum(quotient_up(self.lengths + num_tokens, self.page_size) - self.pages_held(), 0)

    def has_room(self, num_tokens: Int[Array, " seqs"]) -> Bool[Array, " seqs"]:
        """Which rows' tables are wide enough for so many more tokens."""
        return self.lengths + num_tokens <= self.pages_per_seq * self.page_size

    def last_pages(self) -> tuple[Int[Array, " seqs"], Bool[Array, " seqs"]]:
        """The page of each row's next position, and whether it holds tokens of the row already."""
        entry = jnp.clip(quotient(self.lengths, self.page_size), 0, self.pages_per_seq - 1)
        page = jnp.take_along_axis(self.block_tables, entry[:, None], axis=1)[:, 0]
        return page, remainder(self.lengths, self.page_size) != 0

    def slots(self, rows: Array | None, position: Int[Array, "rows queries"]) -> tuple[Array, Array]:
        """Page and offset in it of positions of rows (all of them where `rows` is None), i32[rows, queries] both; positions outside
        of the table are clamped into it."""
        entry = jnp.clip(quotient(position, self.page_size), 0, self.pages_per_seq - 1)
        return jnp.take_along_axis(self.of(rows), entry, axis=1), jnp.maximum(remainder(position, self.page_size), 0)

    def of(self, rows: Array | None) -> Int[Array, "rows pages_per_seq"]:
        """The block tables of some rows; of all where `rows` is None."""
        return self.block_tables if rows is None else self.block_tables[rows]

    def with_pages(
        self, page: Int[Array, "seqs width"], taken: Bool[Array, "seqs width"], copies: Bool[Array, " seqs"] | None
    ) -> "Tables":
        """Each row's taken pages behind those it holds; the first one of a row that copies takes its last page's place."""
        nth = jnp.arange(page.shape[1], dtype=jnp.int32)[None, :]
        entry = self.pages_held()[:, None] + nth
        if copies is not None:
            last = quotient(self.lengths, self.page_size)
            entry = jnp.where((nth == 0) & copies[:, None], last[:, None], entry - copies.astype(jnp.int32)[:, None])
        rows = jnp.broadcast_to(jnp.arange(self.max_seqs, dtype=jnp.int32)[:, None], entry.shape)
        tables = self.block_tables.at[rows, jnp.where(taken, entry, self.pages_per_seq)].set(page, mode="drop")
        return dataclasses.replace(self, block_tables=tables)

    def prefixes(self, source: Int[Array, " seqs"], lengths: Int[Array, " seqs"]) -> Int[Array, "seqs pages_per_seq"]:
        """Block tables that name the pages of each `source` row's first `lengths` tokens."""
        used = quotient_up(lengths, self.page_size)
        entry = jnp.arange(self.pages_per_seq, dtype=jnp.int32)[None, :]
        return jnp.where(entry < used[:, None], self.block_tables[source], 0)

    def replaced(self, rows: Bool[Array, " seqs"], tables: Array, lengths: Array) -> "Tables":
        """Other block tables and lengths for the rows of a mask."""
        tables = jnp.where(rows[:, None], tables, self.block_tables)
        return dataclasses.replace(self, block_tables=tables, lengths=jnp.where(rows, lengths, self.lengths))

    def advance(self, num_tokens: Int[Array, " seqs"]) -> "Tables":
        """So many more tokens are valid."""
        return dataclasses.replace(self, lengths=self.lengths + num_tokens)

    def widened(self, pages_per_seq: int) -> "Tables":
        """The same tables with room for more pages."""
        more = pages_per_seq - self.pages_per_seq
        return dataclasses.replace(self, block_tables=jnp.pad(self.block_tables, ((0, 0), (0, more))))
