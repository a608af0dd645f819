"""The pages of one layer, the unit in which the cache's contents pass through a model."""

from typing import NamedTuple

from jaxtyping import Array


class Pages(NamedTuple):
    """One layer's pages, each `[num_pages, kv_heads, page_size, head_dim]`."""

    k: Array
    v: Array
