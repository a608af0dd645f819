"""Who gets pages: how many each row needs, which rows copy a shared page first, and which rows a pool can serve.

Decided from tables and free list alone, and changing neither: `PagedKVCache.allocate` acts on it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.cache.free_list import FreeList
from jaxkv.cache.tables import Tables
from pallas_kernels.varying import while_loop


def pages_needed(
    tables: Tables, free_list: FreeList, num_tokens: Int[Array, " seqs"], writers: Bool[Array, " seqs"]
) -> tuple[Int[Array, " seqs"], Bool[Array, " seqs"]]:
    """Pages each writing row takes for its new tokens, and which rows copy their last page first.

    Of the writers that share a page all but as many as are needed copy: when every owner writes, the last one keeps it.
    """
    page, holds_tokens = tables.last_pages()
    partly = writers & holds_tokens
    row = jnp.arange(tables.max_seqs, dtype=jnp.int32)
    earlier = partly[None, :] & (page[None, :] == page[:, None]) & (row[None, :] < row[:, None])
    copies = partly & (free_list.ref_counts[page] - jnp.sum(earlier, axis=1, dtype=jnp.int32) > 1)
    return jnp.where(writers, tables.pages_missing(num_tokens) + copies.astype(jnp.int32), 0), copies


def rows_served(tables: Tables, free_list: FreeList, num_tokens: Int[Array, " seqs"]) -> Bool[Array, " seqs"]:
    """Which rows get the pages for their new tokens: in order, each all it needs or nothing, those after a refused row that still
    fit as well."""
    wants = (num_tokens > 0) & ~free_list.out_of_pages

    def too_many(rows: Array) -> Array:
        need = pages_needed(tables, free_list, num_tokens, rows)[0]
        return rows & (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > free_list.num_free)

    def drop_first(rows: Array) -> Array:
        first = lax.argmax(too_many(rows), 0, jnp.int32)
        return rows & (jnp.arange(tables.max_seqs, dtype=jnp.int32) != first)

    wants &= tables.has_room(num_tokens)
    return while_loop(lambda rows: jnp.any(too_many(rows)), drop_first, wants, tables, free_list)
