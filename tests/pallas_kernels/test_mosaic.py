"""The Mosaic kernel in Mosaic's interpreter (jax >= 0.11), on the calls it takes; and what it says of the others.

The interpreter has no `mma`: a plain product stands in for it. Copies, barriers, stages, masks, splits and the merge are the kernel's.
"""

import re

import jax
import numpy as np
import pytest
from kernel_calls import check, run
from kernel_oracle import make_case

from pallas_kernels.choice import mosaic_refusal

modern = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="plgpu.mma came with jax 0.11")


@modern
@pytest.mark.parametrize(
    "case",
    [
        {"lengths": (0, 1, 15, 16, 17, 150)},
        {"lengths": (40, 1100), "kv_heads": 1},
        {"dtype": "float16", "lengths": (70,), "large_v": True},
        {"page_size": 64, "lengths": (0, 63, 64, 65)},
        {"page_size": 256, "lengths": (300,), "head_dim": 96},
        {"page_size": 8, "lengths": (33,), "head_dim": 128},
        {"sliding_window": 9, "logits_soft_cap": 2.0, "sinks": True, "queries": 7, "lengths": (20, 100)},
    ],
    ids=["lengths", "splits", "fp16-large", "page-64", "page-256-dim-96", "page-8", "options"],
)
def test_against_the_oracle(case):
    check(make_case(**({"dtype": "bfloat16"} | case)), "mosaic_interpret")


@modern
def test_a_row_alone_and_among_others():
    case = make_case(lengths=(100, 33, 5), dtype="bfloat16", shared=False)
    together, _ = run(case, "mosaic_interpret")
    for row in range(3):
        single = make_case(lengths=(100, 33, 5), dtype="bfloat16", shared=False)
        single.q, single.block_tables = case.q[row : row + 1], np.tile(case.block_tables[row : row + 1], (1, 16))
        single.lengths, single.num_queries = case.lengths[row : row + 1], case.num_queries[row : row + 1]
        alone, _ = run(single, "mosaic_interpret")
        assert alone[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize(
    "head_dim, page_size, dtype, message",
    [
        (80, 16, "bfloat16", "head_dim.*80"),
        (64, 24, "bfloat16", "page sizes.*24"),
        (64, 16, "float32", "float32"),
        (64, 16, "int8", "int8"),
        (96, 8, "bfloat16", "8 tokens.*96"),
    ],
)
def test_refusals_name_the_way_out(head_dim, page_size, dtype, message):
    reason = mosaic_refusal(head_dim, page_size, dtype, "sm_80")
    if jax.__version_info__ < (0, 11):
        assert "jax 0.11" in reason
    else:
        assert re.search(message, reason) and "triton" in reason
