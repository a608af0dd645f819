"""Dense attention in float64 NumPy, from the definition, and the random cases all implementations are held against.

It shares no code with the package: each query of each row collects its visible keys one row at a time and takes a softmax.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@dataclasses.dataclass
class Case:
    """One call in NumPy; q is [batch, queries, heads, head_dim], options are the keyword options of the operation."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    block_tables: np.ndarray
    lengths: np.ndarray
    num_queries: np.ndarray
    options: dict


def dense_attention(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out f64[batch, queries, heads, head_dim], lse f64[batch, queries, heads])."""
    batch, queries, heads, head_dim = case.q.shape
    _, kv_heads, page_size, _ = case.k_pages.shape
    out, lse = np.zeros(case.q.shape), np.full(case.q.shape[:3], -np.inf)
    for row in range(batch):
        for index in range(int(case.num_queries[row])):
            own = int(case.lengths[row] - case.num_queries[row] + index)
            if own < 0:
                continue
            window = case.options.get("sliding_window")
            seen = np.arange(0 if window is None else max(0, own - window + 1), own + 1)
            pages, slots = case.block_tables[row, seen // page_size], seen % page_size
            for head in range(heads):
                kv = head // (heads // kv_heads)
                k = case.k_pages[pages, kv, slots].astype(np.float64)
                v = case.v_pages[pages, kv, slots].astype(np.float64)
                if case.options.get("k_scales") is not None:
                    k = k * case.options["k_scales"][pages, kv, slots].astype(np.float64)[:, None]
                    v = v * case.options["v_scales"][pages, kv, slots].astype(np.float64)[:, None]
                scale = case.options.get("scale")
                s = k @ case.q[row, index, head].astype(np.float64) * (1 / math.sqrt(head_dim) if scale is None else scale)
                cap = case.options.get("logits_soft_cap")
                s = s if cap is None else cap * np.tanh(s / cap)
                sinks = case.options.get("sinks")
                every = s if sinks is None else np.append(s, np.float64(sinks[head]))
                top = every.max()
                total = np.exp(every - top).sum()
                out[row, index, head] = np.exp(s - top) @ v / total
                lse[row, index, head] = top + np.log(total)
    return out, lse


def make_case(
    *,
    seed: int = 0,
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 150),
    num_queries: tuple[int, ...] | None = None,
    queries: int = 1,
    kv_heads: int = 2,
    q_per_kv: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: str = "float32",
    page_dtype: str | None = None,
    widen: int = 1,
    shared: bool = True,
    dead: float | None = math.nan,
    garbage: bool = True,
    large_v: bool = False,
    sinks: bool = False,
    **options,
) -> Case:
    """Shuffled pages, shared first pages, `dead` in every dead slot and page, garbage in dead table entries."""
    rng = np.random.default_rng(seed)
    page_dtype = page_dtype or dtype
    batch, heads = len(lengths), kv_heads * q_per_kv
    counts = [-(-length // page_size) for length in lengths]
    width = max(max(counts), 1) * widen
    num_pages = sum(counts) + 3
    ids = list(rng.permutation(np.arange(1, num_pages)))
    tables = rng.integers(-(2**31), 2**31 - 1, (batch, width)) if garbage else np.zeros((batch, width))
    tables = tables.astype(np.int32)
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = rng.standard_normal(shape), rng.standard_normal(shape)
    if large_v:
        v = np.clip(v, -6, 6) * 1e4
    live = np.zeros((num_pages, page_size), bool)
    first_full = None
    for row, (length, count) in enumerate(zip(lengths, counts)):
        own = [ids.pop() for _ in range(count)]
        if shared and first_full is not None and length >= page_size:
            own[0] = first_full
        if first_full is None and length >= page_size:
            first_full = own[0]
        tables[row, :count] = own
        for j, page in enumerate(own):
            live[page, : min(page_size, length - j * page_size)] = True
    if page_dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        top = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[page_dtype]
        for name, x in (("k_scales", k), ("v_scales", v)):
            scales = (np.abs(x).max(-1) / top).astype(np.float32)
            x /= scales[..., None].astype(np.float64)
            if dead is not None:
                scales[np.broadcast_to(~live[:, None], scales.shape)] = dead
            options[name] = scales
        k, v = (np.rint(x) if page_dtype == "int8" else x for x in (k, v))
    if dead is not None and page_dtype != "int8":
        hole = np.broadcast_to(~live[:, None, :, None], shape)
        k[hole], v[hole] = dead, dead
    if sinks:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if num_queries is None:
        num_queries = tuple(min(queries, length) for length in lengths)
    q = rng.standard_normal((batch, queries, heads, head_dim)).astype(DTYPES[dtype])
    return Case(
        q,
        k.astype(DTYPES[page_dtype]),
        v.astype(DTYPES[page_dtype]),
        tables,
        np.asarray(lengths, np.int32),
        np.asarray(num_queries, np.int32),
        options,
    )
