"""Every implementation against a dense float64 oracle that shares no code with them."""

import itertools

import jax
import numpy as np
import pytest
from kernel_calls import NATIVE, check, run
from kernel_oracle import make_case

from pallas_kernels.paged_attention_xla import MANY_QUERY_HEADS

ON_GPU = jax.default_backend() == "gpu"
IMPLEMENTATIONS = ("xla", NATIVE, *([pytest.param("triton", id="triton-gpu")] if ON_GPU else ["triton_interpret"]))

# One word per option; each is tried alone and with every other it can go with.
OPTIONS = {
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 9},
    "cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": True},
    "queries": {"queries": 4},
    "deterministic": {"deterministic": True},
    "int8": {"page_dtype": "int8"},
    "e4m3": {"page_dtype": "float8_e4m3fn"},
    "e5m2": {"page_dtype": "float8_e5m2"},
}
PAGES = ("int8", "e4m3", "e5m2")
PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if not set(pair) <= set(PAGES)]


def check_options(implementation, names):
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    check(make_case(lengths=(0, 1, 15, 16, 40, 70), **options), implementation)


# Interpreted kernels take seconds a case: every fifth pair is tried always, all of them with --slow.
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_options_in_pairs(names, implementation):
    check_options(implementation, names)


@pytest.mark.parametrize(
    "names", [pytest.param(p, id="-".join(p), marks=[pytest.mark.slow] if i % 5 else []) for i, p in enumerate(PAIRS)]
)
def test_options_in_pairs_on_the_kernel(names):
    check_options("triton" if ON_GPU else "triton_interpret", names)


@pytest.mark.parametrize("page_size", [1, 16, 24, 256, 512])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 200}, {"page_dtype": "int8", "sinks": True}], ids=str)
def test_so_many_queries_that_xla_takes_longer_blocks(page_size, options):
    assert MANY_QUERY_HEADS <= 130 * 2
    lengths = (0, 1, 255, 256, 257, 700)
    check(
        make_case(
            lengths=lengths, queries=130, num_queries=(0, 1, 130, 129, 3, 130), q_per_kv=2, page_size=page_size, **options
        ),
        "xla",
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestPagedAttention:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_lengths(self, implementation, dtype, page_size):
        lengths = (0, 1, 15, 16, 17, 31, 300, 1100)
        check(make_case(lengths=lengths, page_size=page_size, dtype=dtype), implementation)

    @pytest.mark.parametrize("page_size", [3, 8, 24, 64, 128, 256])
    def test_page_sizes(self, implementation, page_size):
        lengths = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2)
        check(make_case(lengths=lengths, page_size=page_size), implementation)

    @pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 128, 192, 256])
    def test_head_dims(self, implementation, head_dim):
        check(make_case(lengths=(0, 17, 90), head_dim=head_dim, dtype="bfloat16"), implementation)

    @pytest.mark.parametrize("kv_heads, q_per_kv", [(1, 1), (4, 1), (1, 8), (2, 5), (1, 20), (1, 71)])
    def test_groups(self, implementation, kv_heads, q_per_kv):
        check(make_case(lengths=(0, 1, 40), kv_heads=kv_heads, q_per_kv=q_per_kv), implementation)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_options_alone(self, implementation, name):
        check_options(implementation, (name,))

    def test_all_options_together(self, implementation):
        options = {key: value for name in OPTIONS if name not in PAGES for key, value in OPTIONS[name].items()}
        check(make_case(page_dtype="int8", dtype="bfloat16", **options), implementation)

    def test_several_queries_some_of_them_dead(self, implementation):
        check(make_case(lengths=(0, 1, 3, 40, 200), queries=7, num_queries=(0, 1, 2, 7, 5)), implementation)

    def test_many_queries_in_tiles(self, implementation):
        case = make_case(lengths=(150, 40), queries=40, num_queries=(40, 33), q_per_kv=3, sliding_window=20)
        check(case, implementation)

    def test_large_values_in_fp16(self, implementation):
        """jax's own kernel keeps unnormalised partials in q.dtype: values near 6e4 gave inf there."""
        check(make_case(dtype="float16", large_v=True, lengths=(1, 40, 1100)), implementation)

    def test_infinity_in_dead_slots(self, implementation):
        check(make_case(dead=np.inf), implementation)

    def test_length_beyond_the_table_is_cut(self, implementation):
        """A corrupt length must not read out of range: it counts as the table's capacity."""
        case = make_case(lengths=(32, 32), page_size=16, shared=False)
        want, _ = run(case, implementation)
        case.lengths = np.asarray([32, 2**30], np.int32)
        out, _ = run(case, implementation)
        assert out[0].tobytes() == want[0].tobytes() and np.isfinite(out).all()

    def test_dead_pages_behind_the_window_are_not_seen(self, implementation):
        """An engine may give pages behind the window back; their table entries and contents are then anything."""
        case = make_case(lengths=(200,), page_size=16, sliding_window=40, shared=False)
        first_needed = (200 - 40) // 16
        gone = case.block_tables[0, :first_needed]
        case.k_pages[gone], case.v_pages[gone] = np.nan, np.nan
        check(case, implementation)
        case_with_garbage = make_case(lengths=(200,), page_size=16, sliding_window=40, shared=False)
        want, _ = run(case_with_garbage, implementation)
        case_with_garbage.block_tables[0, :first_needed] = -7
        out, _ = run(case_with_garbage, implementation)
        assert out.tobytes() == want.tobytes()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "dtype, page_dtype", [("float32", None), ("float16", None), ("float32", "int8"), ("float16", "int8")]
    )
    @pytest.mark.parametrize("page_size", [8, 16, 32])
    @pytest.mark.parametrize("kv_heads", [1, 2])
    @pytest.mark.parametrize("q_per_kv", [2, 16, 20])
    @pytest.mark.parametrize("head_dim", [32, 64])
    @pytest.mark.parametrize("cap", [None, 2.0])
    def test_grid_of_jax_own_gpu_test(self, implementation, dtype, page_dtype, page_size, kv_heads, q_per_kv, head_dim, cap):
        """Shapes, dtypes and quantization of jax's tests/pallas/gpu_paged_attention_test.py."""
        case = make_case(
            lengths=(1024, 256, 7), page_size=page_size, kv_heads=kv_heads, q_per_kv=q_per_kv, head_dim=head_dim,
            dtype=dtype, page_dtype=page_dtype, logits_soft_cap=cap,
        )  # fmt: skip
        check(case, implementation)
