"""The native attention kernel for every kind of processor that this one can be: exact bits, odd shapes, random calls."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import check, check_results
from kernel_oracle import Case, make_case
from native_calls import native
from needs import needs_library, targets

pytestmark = needs_library

TARGETS = targets()


def queries_of(case: Case, first: int, count: int) -> Case:
    """The case with so many of its only row's queries, from one on, and the keys up to the last of them."""
    behind = case.q.shape[1] - first - count
    lengths = (case.lengths - behind).astype(np.int32)
    return dataclasses.replace(
        case, q=case.q[:, first : first + count], lengths=lengths, num_queries=np.full(1, count, np.int32)
    )


@pytest.mark.parametrize("target", TARGETS)
class TestEveryTarget:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_lengths_around_blocks_and_spans(self, target, dtype):
        case = make_case(lengths=(0, 1, 63, 64, 65, 1023, 1024, 1025, 2300), page_size=24, dtype=dtype)
        check_results(case, *native(case, target))

    @pytest.mark.parametrize("page_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("queries", [1, 30])
    def test_quantized_pages(self, target, page_dtype, queries):
        case = make_case(lengths=(0, 5, 64, 200), queries=queries, page_dtype=page_dtype)
        check_results(case, *native(case, target))

    @pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 15, 17, 31, 33, 64, 80, 100, 128, 256])
    @pytest.mark.parametrize("queries", [1, 9, 33])
    def test_head_dims(self, target, head_dim, queries):
        case = make_case(lengths=(0, 17, 90), head_dim=head_dim, queries=queries, page_size=7)
        check_results(case, *native(case, target))

    @pytest.mark.parametrize("q_per_kv", [1, 2, 3, 4, 7, 8, 9, 16, 20, 33, 71])
    def test_groups(self, target, q_per_kv):
        for queries in (1, 3):
            case = make_case(
                lengths=(0, 2, 70), q_per_kv=q_per_kv, queries=queries, kv_heads=1, sinks=True, logits_soft_cap=3.0
            )
            check_results(case, *native(case, target))

    @pytest.mark.parametrize("q_per_kv", [1, 3, 8])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"sliding_window": 70, "dtype": "bfloat16"},
            {"page_dtype": "int8", "logits_soft_cap": 2.0},
            {"sinks": True, "sliding_window": 1100},
        ],
        ids=str,
    )
    def test_a_query_has_the_same_bits_alone_and_beside_others(self, target, q_per_kv, options):
        """One after the other they are computed with keys in lanes, many at once with queries in lanes."""
        case = make_case(lengths=(1210,), queries=140, q_per_kv=q_per_kv, kv_heads=1, **options)
        out, lse = native(case, target)
        for first, count in ((0, 1), (13, 1), (13, 2), (12, 5), (77, 1), (60, 40), (139, 1)):
            some = native(queries_of(case, first, count), target)
            assert some[0].tobytes() == out[:, first : first + count].tobytes(), (first, count)
            assert some[1].tobytes() == lse[:, first : first + count].tobytes(), (first, count)

    def test_what_only_a_later_query_sees_does_not_matter(self, target):
        """NaN and infinity in the last tokens reach the queries that see them, and no other."""
        case = make_case(lengths=(100,), queries=40, q_per_kv=3)
        want, want_lse = native(case, target)
        for pages, bad in ((case.k_pages, np.nan), (case.v_pages, np.nan), (case.v_pages, np.inf)):
            kept = pages.copy()
            pages[case.block_tables[0, 95 // 16], :, 95 % 16] = bad
            out, lse = native(case, target)
            assert out[:, :35].tobytes() == want[:, :35].tobytes() and lse[:, :35].tobytes() == want_lse[:, :35].tobytes()
            assert not np.isfinite(out[:, 35:]).any()
            pages[...] = kept

    def test_table_entries_out_of_range_are_clamped_where_they_are_live(self, target):
        case = make_case(lengths=(40,), dead=0.0, shared=False)
        case.block_tables[0, 1] = 10**9
        clamped = dataclasses.replace(case, block_tables=case.block_tables.copy())
        clamped.block_tables[0, 1] = case.k_pages.shape[0] - 1
        for a, b in zip(native(case, target), native(clamped, target)):
            np.testing.assert_array_equal(a, b)


@st.composite
def cases(draw) -> Case:
    pick = lambda *values: draw(st.sampled_from(values))
    page_size = pick(1, 2, 3, 8, 16, 24, 64, 100, 256)
    lengths = draw(st.lists(st.one_of(st.integers(0, 140), st.sampled_from([1023, 1024, 1025, 1500])), min_size=1, max_size=5))
    queries = pick(1, 1, 2, 5, 17, 40)
    options = {}
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.integers(1, 150))
    if draw(st.booleans()):
        options["logits_soft_cap"] = pick(0.5, 2.0, 30.0)
    if draw(st.booleans()):
        options["scale"] = pick(-0.2, 0.0, 0.3)
    dtype = pick("float32", "bfloat16", "float16")
    return make_case(
        seed=draw(st.integers(0, 2**31)), lengths=tuple(lengths), queries=queries,
        num_queries=tuple(draw(st.integers(0, queries)) if n else 0 for n in lengths),
        kv_heads=pick(1, 2, 3), q_per_kv=pick(1, 2, 3, 5, 8, 17), head_dim=pick(1, 5, 16, 32, 40, 64), page_size=page_size, dtype=dtype,
        page_dtype=pick(dtype, dtype, "int8", "float8_e4m3fn", "float8_e5m2"), widen=pick(1, 2), shared=draw(st.booleans()),
        dead=pick(np.nan, np.inf, 0.0), sinks=draw(st.booleans()), **options,
    )  # fmt: skip


@settings(max_examples=25)
@given(cases(), st.sampled_from(TARGETS))
def test_random_calls(case, target):
    check_results(case, *native(case, target))


@pytest.mark.slow
@settings(max_examples=2000)
@given(cases(), st.sampled_from(TARGETS))
def test_many_random_calls(case, target):
    check_results(case, *native(case, target))


def test_the_oracle_notices_a_wrong_result():
    case = make_case(lengths=(40,), sliding_window=9)
    check(case, "cpu")
    with pytest.raises(AssertionError):
        check_results(case, *native(dataclasses.replace(case, options={"sliding_window": 10})))
