"""What is refused and how; offsets near 2**31; bytes a launch reads, from the kernel's own loop bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import NATIVE, check
from kernel_oracle import dense_attention, make_case

import pallas_kernels
from pallas_kernels import key_blocks, options, paged_attention_xla
from pallas_kernels.choice import triton_refusal
from pallas_kernels.config import MOSAIC_BLOCK_TOKENS as BLOCK_TOKENS
from pallas_kernels.config import KernelConfig, generation_of, kernel_config, mosaic_config
from pallas_kernels.launch import make_launch
from pallas_kernels.options import AttentionOptions
from pallas_kernels.tools.targets import TARGETS, target_mesh
from pallas_kernels.tools.traffic import bytes_read, mosaic_slot_reads, slot_reads
from pallas_kernels.write_pages_op import slot_indices


def arguments(dtype="float32", page_dtype=None):
    array = lambda *shape, dtype=dtype: jnp.zeros(shape, dtype)
    pages = array(5, 2, 8, 16, dtype=page_dtype or dtype)
    return {
        "q": array(3, 4, 16), "k_pages": pages, "v_pages": pages,
        "block_tables": array(3, 2, dtype="int32"), "lengths": array(3, dtype="int32"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((3, 16))}, "q must be"),
        ({"q": jnp.zeros((3, 5, 16))}, "multiple of kv_heads"),
        ({"q": jnp.zeros((3, 4, 8))}, "head_dim 8"),
        ({"q": jnp.zeros((3, 4, 16), jnp.bfloat16)}, "one dtype"),
        ({"k_pages": jnp.zeros((5, 2, 8))}, "k_pages must be"),
        ({"v_pages": jnp.zeros((5, 2, 8, 8))}, "v_pages must have shape"),
        ({"block_tables": jnp.zeros((2, 2), jnp.int32)}, "block_tables must be"),
        ({"lengths": jnp.zeros((3,))}, "lengths must be int32"),
        ({"lengths": jnp.zeros((4,), jnp.int32)}, "lengths must have shape"),
        ({"num_queries": jnp.zeros((3,), jnp.int32)}, "4-D q"),
        ({"sinks": jnp.zeros((3,))}, "sinks must have shape"),
        ({"k_scales": jnp.zeros((5, 2, 8))}, "take no k_scales"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"scale": float("nan")}, "scale"),
        ({"implementation": "cuda"}, "'cuda'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_attention(**(arguments() | change))


def test_quantized_pages_need_scales():
    with pytest.raises(ValueError, match="need k_scales"):
        pallas_kernels.paged_attention(**arguments(page_dtype="int8"))


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_a_named_implementation_that_cannot_run_raises(name):
    with pytest.raises(NotImplementedError, match=f"{name}.*cannot run"):
        pallas_kernels.paged_attention(**arguments(), implementation=name)


def test_e4m3_on_sm_80_is_refused_before_the_compiler_sees_it():
    scales = jnp.zeros((5, 2, 8))
    call = lambda **a: pallas_kernels.paged_attention(**a, k_scales=scales, v_scales=scales, implementation="triton")
    refused = pytest.raises(NotImplementedError, match="float8_e4m3fn.*9.0.*float8_e5m2 or int8")
    with jax.sharding.use_abstract_mesh(target_mesh(TARGETS["sm_80"])), refused:
        jax.eval_shape(call, **arguments(page_dtype="float8_e4m3fn"))
    with jax.sharding.use_abstract_mesh(target_mesh(TARGETS["sm_90a"])):
        jax.eval_shape(call, **arguments(page_dtype="float8_e4m3fn"))


def test_configurations_are_checked():
    good = {"generation": "sm_90", "block_tokens": 64, "split_tokens": 1024, "tile_rows": 16, "num_warps": 4, "num_stages": 3}
    KernelConfig(**good)
    for name, value in (
        ("generation", "sm_70"), ("block_tokens", 48), ("split_tokens", 100), ("tile_rows", 8), ("num_warps", 3), ("num_stages", 0)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            KernelConfig(**(good | {name: value}))
    assert [generation_of(c) for c in ("8.0", "8.9", "9.0", "10.0", "12.0")] == ["sm_80", "sm_80", "sm_90", "sm_100", "sm_100"]
    with pytest.raises(NotImplementedError, match="7.5"):
        generation_of("7.5")


def test_pools_whose_triton_offsets_would_overflow():
    """jax's Triton lowering takes 32-bit element offsets up to 2**32 bytes: one-byte pools wrap above 2**31 elements."""
    refused = lambda shape, dtype: triton_refusal(shape, dtype) is not None
    assert not refused((2**20, 8, 2, 128), "int8")  # 2**31 elements: the last offset is 2**31 - 1
    assert "overflow int32" in (triton_refusal((2**20 + 1, 8, 2, 128), "int8") or "")
    assert not refused((2**21 + 1, 8, 2, 128), "int8")  # above 2**32 bytes offsets are 64 bits wide
    assert not refused((2**20, 8, 2, 128), "bfloat16") and not refused((2**20 + 1, 8, 2, 128), "bfloat16")
    pool = jax.ShapeDtypeStruct((2**20 + 1, 8, 2, 128), jnp.int8)
    scales, new, index = (
        jax.ShapeDtypeStruct(*x) for x in ((pool.shape[:3], "float32"), ((3, 8, 128), "float32"), ((3,), "int32"))
    )
    call = lambda *a: pallas_kernels.write_pages(*a[:6], k_scales=a[6], v_scales=a[6], implementation="triton_interpret")
    with pytest.raises(NotImplementedError, match="triton_interpret.*overflow int32"):
        jax.eval_shape(call, pool, pool, new, new, index, index, scales)


def test_slots_near_the_limit_of_int32():
    shape = (2**16 - 1, 8, 4096, 128)  # 2**31 - 2**15 slots, 2**38 elements: far over 4 GiB
    pages, offsets = np.array([1, 2**16 - 2], np.int32), np.array([0, 4095], np.int32)
    got = np.asarray(slot_indices(shape, jnp.asarray(pages), jnp.asarray(offsets))).reshape(2, 8)
    want = (pages.astype(np.int64)[:, None] * 8 + np.arange(8)) * 4096 + offsets.astype(np.int64)[:, None]
    assert (got == want).all() and want.max() == 2**31 - 2**15 - 1
    tokens = paged_attention_xla.BLOCK_TOKENS
    blocks = 4096 // tokens  # of a page; the gather's row numbers of the last page's last block
    table, row = jnp.full((1, 2), 2**16 - 2, jnp.int32), jnp.zeros(1, jnp.int32)
    found = key_blocks.first_rows(row + blocks - 1, tokens, shape, table, row)
    rows = np.asarray(key_blocks.rows_of_heads(found, tokens, shape))
    want = ((2**16 - 2) * 8 + np.arange(8)) * blocks + blocks - 1
    assert (rows.reshape(8) == want).all() and rows.max() < 2**31 // tokens


def test_a_pool_with_more_slots_than_int32_counts_is_refused():
    pool = jax.ShapeDtypeStruct((2**16, 8, 4096, 128), jnp.int8)
    with pytest.raises(ValueError, match="2\\*\\*31 - 1"):
        jax.eval_shape(lambda p: options.check_pages(p, p, None, None), pool)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [16, 24, 256])
def test_every_live_page_is_read_once(window, page_size):
    """Bytes from the kernel's own loop bounds; a page behind the window is not read at all."""
    case = make_case(lengths=(0, 1, 16, 300, 1500, 2400), page_size=page_size, kv_heads=2, q_per_kv=4)
    head_dim, itemsize = 64, 2
    settings = AttentionOptions(scale=1.0, sliding_window=window)
    config = kernel_config("sm_90", head_dim=head_dim, page_dtype="bfloat16", rows=4)
    fields = (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)
    launch = make_launch(key_blocks.Problem(*fields, None, None, None), settings, config)
    reads = slot_reads(launch, case.lengths, case.num_queries)
    for row, length in enumerate(case.lengths):
        first = 0 if window is None else max(0, int(length) - window)
        want = np.zeros(reads.shape[1], int)
        want[first:length] = 1
        assert (reads[row] == want).all(), f"length {length}"
    pages = sum(-(-int(n) // page_size) - (0 if window is None else max(0, int(n) - window) // page_size) for n in case.lengths)
    limit = 2 * pages * page_size * 2 * head_dim * itemsize
    total = bytes_read(launch, case.lengths, case.num_queries, itemsize)
    partial = 2 * 2 * page_size * len(case.lengths) * 2 * head_dim * itemsize  # a part of the first and last page each
    assert limit - partial <= total <= limit


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_every_live_page_is_copied_once_by_mosaic(window, page_size):
    """Whole pages, or pieces of 32 slots; what fills up a block is the null page, never a page of another row or window."""
    case = make_case(lengths=(0, 1, 16, 300, 1500), page_size=page_size, kv_heads=2, q_per_kv=4)
    fields = (case.q, case.k_pages, case.v_pages, case.block_tables, case.lengths, case.num_queries)
    settings = AttentionOptions(scale=1.0, sliding_window=window)
    launch = make_launch(key_blocks.Problem(*fields, None, None, None), settings, mosaic_config("sm_90"))
    reads, null = mosaic_slot_reads(launch, case.lengths, case.num_queries)
    piece = min(page_size, BLOCK_TOKENS)
    for row, length in enumerate(case.lengths):
        first = 0 if window is None else max(0, int(length) - window)
        want = np.zeros(reads.shape[1], int)
        want[first // piece * piece : -(-int(length) // piece) * piece] = 1
        assert (reads[row] == want).all(), f"length {length}"
    assert null < 2 * BLOCK_TOKENS * len(case.lengths)


@pytest.mark.parametrize("implementation", ["xla", NATIVE, "triton_interpret"])
def test_prefill_is_one_row_of_many_queries(implementation):
    case = make_case(lengths=(75,), queries=20, num_queries=(17,), sliding_window=30)
    out, lse = pallas_kernels.paged_prefill_attention(
        jnp.asarray(case.q[0]), jnp.asarray(case.k_pages), jnp.asarray(case.v_pages), jnp.asarray(case.block_tables[0]),
        jnp.int32(75), jnp.int32(17), sliding_window=30, return_lse=True, implementation=implementation,
    )  # fmt: skip
    want, want_lse = dense_attention(case)
    np.testing.assert_allclose(out, want[0], atol=1e-5)
    np.testing.assert_allclose(lse[:17], want_lse[0, :17], atol=1e-5)
    assert np.isneginf(lse[17:]).all()


def test_the_oracle_notices_a_wrong_kernel():
    """The comparison can fail: a window one key too wide is found."""
    case = make_case(lengths=(40,), sliding_window=9)
    with pytest.raises(AssertionError):
        check(case, "xla", sliding_window=10)
