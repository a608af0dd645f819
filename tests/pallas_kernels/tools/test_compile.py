"""Each kernel compiles to machine code for three GPU generations on a machine without a GPU. Nothing here runs on a GPU.

Needs the CUDA plugin of jax's version and ptxas (the `gpu-compile` extra); skipped, with the reason, where they are missing.
"""

import itertools

import jax
import pytest

from pallas_kernels.choice import mosaic_refusal
from pallas_kernels.tools.compile_report import CompileCase, compile_cases, missing_tools
from pallas_kernels.tools.targets import TARGETS

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (1, 2, 3, 8, 16, 24, 32, 64, 128, 256)
DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "int8"),
          ("bfloat16", "float8_e5m2"), ("bfloat16", "float8_e4m3fn"))  # fmt: skip
OURS = {"paged_attention", "paged_attention_merge", "write_pages"}


def can_compile(case: CompileCase) -> bool:
    return not (case.arch == "sm_80" and case.page_dtype == "float8_e4m3fn")


def assert_compiles(cases: list[CompileCase]) -> None:
    """No spills, at most 128 registers up to head_dim 128, shared memory within the target's limit; all faults at once."""
    faults = []
    for result in compile_cases(cases):
        case = result["case"]
        if "error" in result:
            faults.append(f"{case}: {result['error'][:400]}")
            continue
        kernels = {k["name"]: k for k in result["kernels"] if k["name"] in OURS}
        want = {"write_pages"} if case.operation == "write" else {"paged_attention", "paged_attention_merge"}
        if case.implementation == "mosaic":
            want = {"paged_attention"}  # its merge is plain XLA
        if set(kernels) != want:
            faults.append(f"{case}: kernels {sorted(kernels)}, expected {sorted(want)}")
        for name, kernel in kernels.items():
            if kernel["spill_bytes"]:
                faults.append(f"{case}: {name} spills {kernel['spill_bytes']} bytes")
            if kernel["registers"] > (128 if case.head_dim <= 128 else 255):
                faults.append(f"{case}: {name} takes {kernel['registers']} registers")
            if kernel["shared_bytes"] > TARGETS[case.arch].shared_per_block:
                faults.append(f"{case}: {name} takes {kernel['shared_bytes']} bytes of shared memory")
        attention = kernels.get("paged_attention")
        if attention and not attention["wide_copies"]:
            faults.append(f"{case}: no 16-byte copies")
        if attention and case.dtype != "float32" and not attention["tensor_core"]:
            faults.append(f"{case}: no tensor-core instructions")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_for(arch):
    """One case of each kind: the corners of dtype, head_dim, page size, queries and options."""
    cases = [
        CompileCase(arch),
        CompileCase(arch, head_dim=80, page_size=24),
        CompileCase(arch, head_dim=256, page_size=256, queries=64),
        CompileCase(arch, dtype="float32", page_dtype="float32"),
        CompileCase(arch, page_dtype="int8", sliding_window=1024, logits_soft_cap=30.0, sinks=True),
        CompileCase(arch, page_dtype="float8_e5m2", queries=4),
        CompileCase(arch, page_dtype="float8_e4m3fn", deterministic=True),
        CompileCase(arch, operation="write"),
        CompileCase(arch, operation="write", page_dtype="int8", head_dim=80),
    ]
    assert_compiles([case for case in cases if can_compile(case)])


modern = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="plgpu.mma came with jax 0.11")


@modern
@pytest.mark.parametrize("arch", TARGETS)
def test_mosaic_compiles_for(arch):
    cases = [
        CompileCase(arch, implementation="mosaic"),
        CompileCase(arch, implementation="mosaic", head_dim=64, page_size=8, dtype="float16", page_dtype="float16"),
        CompileCase(
            arch, implementation="mosaic", head_dim=96, queries=64, sliding_window=512, logits_soft_cap=30.0, sinks=True
        ),
        CompileCase(arch, implementation="mosaic", head_dim=256, page_size=256),
    ]
    assert_compiles(cases)


@modern
@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dim_and_page_size_mosaic_takes_compiles_for(arch, dtype):
    shapes = itertools.product((64, 96, 128, 160, 192, 224, 256), (8, 16, 32, 64, 128, 256))
    cases = [
        CompileCase(arch, implementation="mosaic", dtype=dtype, page_dtype=dtype, head_dim=d, page_size=p)
        for d, p in shapes
        if mosaic_refusal(d, p, dtype, TARGETS[arch].generation) is None
    ]
    assert len(cases) >= 39
    assert_compiles(cases)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype, page_dtype", DTYPES)
def test_every_head_dim_and_page_size_compiles_for(arch, dtype, page_dtype):
    shapes = [(d, p, 0) for d, p in itertools.product(HEAD_DIMS, PAGE_SIZES)] + [(d, 16, q) for d in HEAD_DIMS for q in (4, 64)]
    cases = [CompileCase(arch, dtype=dtype, page_dtype=page_dtype, head_dim=d, page_size=p, queries=q) for d, p, q in shapes]
    if not can_compile(cases[0]):
        pytest.skip("e4m3 is refused on sm_80, see test_errors_and_limits")
    assert_compiles(cases)


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype, page_dtype", DTYPES)
def test_every_write_compiles_for(arch, dtype, page_dtype):
    cases = [CompileCase(arch, operation="write", dtype=dtype, page_dtype=page_dtype, head_dim=d) for d in HEAD_DIMS]
    if not can_compile(cases[0]):
        pytest.skip("e4m3 is refused on sm_80, see test_errors_and_limits")
    assert_compiles(cases)
