"""A row's bits do not depend on the other rows, the table's width, the page size or how many queries run with it."""

import numpy as np
import pytest
from kernel_calls import NATIVE, check, jitted, run
from kernel_oracle import Case, make_case

from pallas_kernels import paged_attention_xla

pytestmark = pytest.mark.usefixtures("optimized")

LENGTH, HEAD_DIM = 333, 64


def rows(batch, *, page_size=16, widen=1, kv_heads=2, q_per_kv=3, dtype="float32", queries=1, ends=None, **options):
    """`batch` rows, the middle one of LENGTH tokens, the same in every call; the others hold prefixes of its pages.

    Returns the case and the index of that row.
    """
    from kernel_oracle import DTYPES

    rng = np.random.default_rng(7)
    q = rng.standard_normal((LENGTH, kv_heads * q_per_kv, HEAD_DIM)).astype(DTYPES[dtype])
    k, v = rng.standard_normal((2, LENGTH, kv_heads, HEAD_DIM))
    count = -(-LENGTH // page_size)
    ids = np.random.default_rng(page_size).permutation(np.arange(1, count + 1))
    pages = np.full((2, count + 1, kv_heads, page_size, HEAD_DIM), np.nan)
    for position in range(LENGTH):
        pages[0, ids[position // page_size], :, position % page_size] = k[position]
        pages[1, ids[position // page_size], :, position % page_size] = v[position]
    pages = pages.astype(DTYPES[dtype])
    tables = np.full((batch, count * widen), -3, np.int32)
    tables[:, :count] = ids
    others = np.random.default_rng(batch)
    at = batch // 2
    lengths = others.integers(0, LENGTH, batch).astype(np.int32)
    every = others.standard_normal((batch, queries, kv_heads * q_per_kv, HEAD_DIM)).astype(DTYPES[dtype])
    end = LENGTH if ends is None else ends
    real = min(queries, end)
    lengths[at] = end
    every[at, :real] = q[end - real : end]
    counts = np.minimum(lengths, queries).astype(np.int32)
    return Case(every, *pages, tables, lengths, counts, options), at


@pytest.mark.parametrize(
    "implementation, dtype, deterministic",
    [
        *((i, "float32", d) for i in ("xla", "triton_interpret") for d in (False, True)),
        ("xla", "bfloat16", False),
        ("triton_interpret", "bfloat16", False),
        *(pytest.param("cpu", dtype, False, marks=NATIVE.marks) for dtype in ("float32", "bfloat16")),
    ],
)
def test_other_rows_and_table_width(implementation, dtype, deterministic):
    """Regression: XLA's sum over the last axis is cut among threads by the number of rows, and its float32 bits with it."""

    def bits(batch, widen):
        case, at = rows(batch, widen=widen, dtype=dtype, deterministic=deterministic)
        out, lse = run(case, implementation)
        return out[at].tobytes(), lse[at].tobytes()

    alone = bits(1, 1)
    for batch, widen in ((2, 1), (8, 1), (64, 1), (1, 4), (1, 16)):
        assert bits(batch, widen) == alone, f"batch {batch}, table {widen}x"


@pytest.mark.parametrize("kv_heads, q_per_kv", [(1, 1), (4, 1), (1, 8), (3, 3), (4, 4)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_other_rows_on_other_head_counts(kv_heads, q_per_kv, deterministic):
    """Regression: with one query per kv head the products are with vectors, whose bits changed with 64 rows in jaxlib 0.12."""

    def bits(batch):
        case, at = rows(batch, kv_heads=kv_heads, q_per_kv=q_per_kv, deterministic=deterministic)
        return tuple(x[at].tobytes() for x in run(case, "xla"))

    alone = bits(1)
    for batch in (2, 8, 64):
        assert bits(batch) == alone, f"batch {batch}"


def test_other_rows_beside_one_with_many_queries():
    def bits(batch, **changes):
        case, at = rows(batch, queries=100, **changes)
        return tuple(x[at].tobytes() for x in run(case, "xla"))

    alone = bits(1)
    for batch, changes in ((2, {}), (8, {"widen": 4}), (1, {"page_size": 3})):
        assert bits(batch, **changes) == alone, f"batch {batch}, {changes}"


@pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
def test_page_size(implementation):
    def bits(page_size):
        case, at = rows(1, page_size=page_size)
        return tuple(x[at].tobytes() for x in run(case, implementation))

    base = bits(16)
    for page_size in (1, 3, 8, 24, 128, 256):
        assert bits(page_size) == base, f"page size {page_size}"


@pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
@pytest.mark.parametrize(
    "dtype, kv_heads, q_per_kv, window", [("float32", 2, 3, None), ("bfloat16", 2, 3, None), ("float32", 1, 8, 50)]
)
def test_deterministic_decode_equals_prefill(implementation, dtype, kv_heads, q_per_kv, window):
    """What rollout and training log-probabilities that agree bit by bit rest on."""

    def bits(queries, ends, index):
        case, at = rows(
            1, queries=queries, ends=ends, dtype=dtype, kv_heads=kv_heads, q_per_kv=q_per_kv,
            deterministic=True, sliding_window=window,
        )  # fmt: skip
        out, lse = run(case, implementation)
        return out[at, index].tobytes(), lse[at, index].tobytes()

    for position in (0, 99, 127, 128, 140):
        decoded = bits(1, position + 1, 0)
        assert bits(64, 141 if position >= 77 else 64, position - 77 if position >= 77 else position) == decoded, position
        assert bits(5, position + 1, min(4, position)) == decoded, position


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 70}, {"queries": 5, "deterministic": True}, {"queries": 3, "sinks": True}]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_xla_turns_leave_no_trace(rows, options, monkeypatch):
    """A few blocks of the schedule a turn: every row's bits are those of more at once, with rows that meet in a turn or do not."""
    kv_heads, head_dim = 2, 64
    case = make_case(lengths=(64, 0, 300, 1, 129, 65, 500, 17), kv_heads=kv_heads, head_dim=head_dim, **options)
    want = run(case, "xla")
    check(case, "xla")
    monkeypatch.setattr(paged_attention_xla, "TURN_BYTES", rows * kv_heads * paged_attention_xla.BLOCK_TOKENS * head_dim * 4)
    jitted.cache_clear()
    got = run(case, "xla")
    jitted.cache_clear()
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
