"""The static options of paged attention, and the checks that the public operations make.

Axis words, written once for the package:

| word          | meaning                                                                                   |
|---------------|-------------------------------------------------------------------------------------------|
| batch         | rows: one sequence each                                                                   |
| queries       | new tokens per row (1 in plain decode)                                                    |
| chunk         | new tokens of the one row of a prefill                                                    |
| heads         | query heads; query head i reads kv head i // q_per_kv                                     |
| kv_heads      | heads of the pages; q_per_kv = heads // kv_heads                                          |
| head_dim      | features per head                                                                         |
| num_pages     | pages in the pool; page 0 is the null page, where nothing live ever is                    |
| page_size     | tokens per page                                                                           |
| pages_per_seq | width of a block table                                                                    |
| tokens        | tokens written at once                                                                    |

Where a query stands, for a row with `length` valid tokens of which the first-to-last `num_queries` are new:

    absolute position   0 ........ length - num_queries ........ length - 1 | dead
    query index                    0 ........ num_queries - 1               | dead queries, result 0
    query i sees        (own - sliding_window, own],  own = length - num_queries + i
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("xla", "cpu", "triton", "mosaic", "triton_interpret", "mosaic_interpret")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The static part of one call, hashable, shared by all implementations.

    Args:
      scale: factor on q . k, before the soft cap.
      sliding_window: a query at position p sees keys in (p - sliding_window, p]; None is no window.
      logits_soft_cap: scores become cap * tanh(score / cap); None is no cap.
      deterministic: queries run in tiles of one fixed size, so that a query's bits do not depend on how many run with it.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.scale, (int, float)) and math.isfinite(self.scale)):
            raise ValueError(f"scale must be a finite python number, got {self.scale!r}")
        window, cap = self.sliding_window, self.logits_soft_cap
        if window is not None and not (isinstance(window, int) and window > 0):
            raise ValueError(f"sliding_window must be a python int > 0 or None, got {window!r}")
        if cap is not None and not (isinstance(cap, (int, float)) and math.isfinite(cap) and cap > 0):
            raise ValueError(f"logits_soft_cap must be a finite python number > 0 or None, got {cap!r}")


def bits_of(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What a dtype travels as where XLA on CPU would widen it: the unsigned integer of a narrow one's size, else itself."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype))


def is_quantized(dtype: jax.typing.DTypeLike) -> bool:
    """Whether pages of this dtype need scales."""
    return jnp.dtype(dtype).name in QUANTIZED_DTYPES


def _check_shape(name: str, array: jax.Array, want: tuple[int, ...]) -> None:
    if tuple(array.shape) != want:
        raise ValueError(f"{name} must have shape {want}, got {tuple(array.shape)}")


def _check_int32(name: str, array: jax.Array) -> None:
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32, got {array.dtype}")


def check_pages(k_pages: jax.Array, v_pages: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None) -> None:
    """Checks a pool of pages and its scales.

    Raises:
      ValueError: shapes or dtypes disagree, a quantized pool lacks scales or a plain one has them, or the pool has more
        (page, head, token) slots than int32 can count.
    """
    if k_pages.ndim != 4:
        raise ValueError(f"k_pages must be [num_pages, kv_heads, page_size, head_dim], got shape {k_pages.shape}")
    _check_shape("v_pages", v_pages, tuple(k_pages.shape))
    if k_pages.dtype != v_pages.dtype:
        raise ValueError(f"k_pages and v_pages must have one dtype, got {k_pages.dtype} and {v_pages.dtype}")
    name = jnp.dtype(k_pages.dtype).name
    if name not in FLOAT_DTYPES + QUANTIZED_DTYPES:
        raise ValueError(f"pages must be one of {FLOAT_DTYPES + QUANTIZED_DTYPES}, got {name}")
    if min(k_pages.shape) < 1:
        raise ValueError(f"pages must have no empty axis, got shape {k_pages.shape}")
    slots = math.prod(k_pages.shape[:3])
    if slots > INT32_MAX:
        raise ValueError(f"a pool may have at most 2**31 - 1 (page, head, token) slots, got {slots} for {k_pages.shape}")
    for label, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if is_quantized(name) != (scales is not None):
            need = "need" if is_quantized(name) else "take no"
            raise ValueError(f"{name} pages {need} {label} (f32[num_pages, kv_heads, page_size])")
        if scales is not None:
            _check_shape(label, scales, tuple(k_pages.shape[:3]))
            if scales.dtype != jnp.float32:
                raise ValueError(f"{label} must be float32, got {scales.dtype}")


def check_queries(
    q: jax.Array,
    k_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    num_queries: jax.Array | None,
    sinks: jax.Array | None,
) -> None:
    """Checks 4-D queries and the per-row integers against a pool that check_pages has passed.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument and shows its value.
    """
    batch, _, heads, head_dim = q.shape
    _, kv_heads, _, page_dim = k_pages.shape
    if jnp.dtype(q.dtype).name not in FLOAT_DTYPES:
        raise ValueError(f"q must be one of {FLOAT_DTYPES}, got {q.dtype}")
    if not is_quantized(k_pages.dtype) and q.dtype != k_pages.dtype:
        raise ValueError(f"q and plain pages must have one dtype, got {q.dtype} and {k_pages.dtype}")
    if head_dim != page_dim:
        raise ValueError(f"q has head_dim {head_dim}, the pages have {page_dim}")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if block_tables.ndim != 2 or block_tables.shape[0] != batch or block_tables.shape[1] < 1:
        raise ValueError(f"block_tables must be [batch = {batch}, pages_per_seq >= 1], got shape {block_tables.shape}")
    _check_int32("block_tables", block_tables)
    for label, array in (("lengths", lengths), ("num_queries", num_queries)):
        if array is not None:
            _check_shape(label, array, (batch,))
            _check_int32(label, array)
    if sinks is not None:
        _check_shape("sinks", sinks, (heads,))
        if not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise ValueError(f"sinks must be floating, got {sinks.dtype}")


def check_writes(k_pages: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array) -> None:
    """Checks new keys and values [tokens, kv_heads, head_dim] and where they go.

    Raises:
      ValueError: a shape or dtype is wrong.
    """
    if k.ndim != 3:
        raise ValueError(f"k must be [tokens, kv_heads, head_dim], got shape {k.shape}")
    want = (k.shape[0], k_pages.shape[1], k_pages.shape[3])
    for label, array in (("k", k), ("v", v)):
        _check_shape(label, array, want)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{label} must be floating, got {array.dtype}")
    for label, array in (("pages", pages), ("offsets", offsets)):
        _check_shape(label, array, want[:1])
        _check_int32(label, array)
