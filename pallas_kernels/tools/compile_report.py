"""Machine code for a GPU on a machine without one: what the compiler says about each kernel, and what follows from it.

    python -m pallas_kernels.tools.compile_report <spec.json>      compiles the cases of one target, prints one JSON line each

XLA's GPU compiler, from the CUDA plugin of jax's own version, compiles the whole jitted program; `ptxas -v` then assembles the
PTX it leaves behind and reports registers, spills and shared memory. An error inside LLVM ends the process and Mosaic keeps the
first target it has seen, so `compile_cases` runs one process per target.

It says "compiles for", never "runs on": no figure here was measured on a GPU.
"""

# pyright: reportOptionalSubscript=false, reportCallIssue=false, reportArgumentType=false
# (searches for lines that ptxas always prints, and runs only where find_ptxas found one)

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp

from pallas_kernels.options import is_quantized
from pallas_kernels.tools.targets import TARGETS, target_mesh, target_sharding

_MOSAIC_NAME = "anonymous_mosaic_gpu_kernel"


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One program to compile; `queries` 0 stands for a 3-D q (plain decode), `operation` is "attention" or "write"."""

    arch: str
    operation: str = "attention"
    implementation: str = "triton"
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"
    head_dim: int = 128
    page_size: int = 16
    batch: int = 8
    queries: int = 0
    heads: int = 32
    kv_heads: int = 8
    tokens: int = 4096
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What ptxas and the PTX say about one kernel of a compiled program."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    wide_copies: int
    tensor_core: int


def find_ptxas() -> str | None:
    """The assembler: of the `nvidia-cuda-nvcc` package, on the path, or of a CUDA toolkit.

    The package first: it comes with the plugin whose PTX it has to understand, and an older one on the path may not.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (pathlib.Path(p) for p in (spec.submodule_search_locations or [])) if spec else ():
        for path in (*root.glob("*/bin/ptxas"), *root.glob("bin/ptxas")):
            return str(path)
    toolkit = pathlib.Path("/usr/local/cuda/bin/ptxas")
    return shutil.which("ptxas") or (str(toolkit) if toolkit.exists() else None)


def missing_tools() -> str | None:
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt of jax's version are not installed"
    if find_ptxas() is None:
        return "no ptxas: neither a CUDA toolkit nor nvidia-cuda-nvcc is installed"
    return None


def abstract_arguments(case: CompileCase, sharding) -> tuple[dict, dict]:
    """(arrays, static options) of the operation, the arrays as shapes on the target."""
    pages_per_seq = -(-case.tokens // case.page_size)
    num_pages = case.batch * pages_per_seq + 1
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    pages = array((num_pages, case.kv_heads, case.page_size, case.head_dim), case.page_dtype)
    scales = array(pages.shape[:3], "float32") if is_quantized(case.page_dtype) else None
    arrays = {"k_pages": pages, "v_pages": pages, "k_scales": scales, "v_scales": scales}
    if case.operation == "write":
        new = array((case.batch, case.kv_heads, case.head_dim), case.dtype)
        index = array((case.batch,), "int32")
        return arrays | {"k": new, "v": new, "pages": index, "offsets": index}, {"implementation": case.implementation}
    queries = (case.queries,) if case.queries else ()
    arrays |= {
        "q": array((case.batch, *queries, case.heads, case.head_dim), case.dtype),
        "block_tables": array((case.batch, pages_per_seq), "int32"),
        "lengths": array((case.batch,), "int32"),
        "sinks": array((case.heads,), "float32") if case.sinks else None,
    }
    names = ("sliding_window", "logits_soft_cap", "deterministic", "implementation")
    return arrays, {name: getattr(case, name) for name in names}


def compile_case(case: CompileCase, folder: pathlib.Path) -> list[KernelReport]:
    """Compiles one program for its target and reads back what the compiler left in `folder`."""
    from pallas_kernels import paged_attention, write_pages

    target = TARGETS[case.arch]
    arrays, options = abstract_arguments(case, target_sharding(target))
    operation = paged_attention if case.operation == "attention" else write_pages
    donated = tuple(name for name in arrays if case.operation == "write" and name.endswith(("_pages", "_scales")))
    jitted = jax.jit(lambda **arrays: operation(**arrays, **options), donate_argnames=donated or None)
    modern = jax.__version_info__ >= (0, 11)
    compiler = {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    } | ({"xla_dump_emitter_re": "ptx"} if modern else {})
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    with jax.sharding.use_abstract_mesh(target_mesh(target)):
        lowered = jitted.trace(**arrays).lower(lowering_platforms=("cuda",))
    lowered.compile(compiler_options=compiler)
    launches, files = _launches(folder), sorted(folder.rglob("*.ptx"))
    for path in folder.glob("*.resources.txt"):  # Mosaic's own dump; one warpgroup, and its name says nothing
        shared = re.search(r"smem_scratch_bytes=(\d+)", path.read_text())
        launches[_MOSAIC_NAME] = (128, int(shared[1]))
    return [report for path in files if path.stat().st_size for report in read_ptx(path, case.arch, launches)]


def _launches(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """(threads per block, bytes of shared memory, the dynamic part included) of each kernel, from XLA's thunk dump."""
    pattern = re.compile(r"\] ([\w.$]+) grid: \[.*?\] threads: \[(\d+), .*?shared_memory: (\d+) bytes")
    lines = [line for path in folder.rglob("*thunk_sequence.txt") for line in path.read_text().splitlines()]
    return {m[1]: (int(m[2]), int(m[3])) for m in map(pattern.search, lines) if m}


def read_ptx(path: pathlib.Path, arch: str, launches: dict[str, tuple[int, int]]) -> list[KernelReport]:
    """Assembles one PTX file with `ptxas -v` and counts its 16-byte copies and tensor-core instructions."""
    text = path.read_text()
    made = subprocess.run([find_ptxas(), "-v", f"-arch={arch}", "-o", os.devnull, str(path)], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{find_ptxas()} refused {path.name}: {made.stderr.strip() or made.stdout.strip()}")
    reports = []
    for block in re.split(r"(?=Compiling entry function)", made.stderr)[1:]:
        name = re.search(r"entry function '([^']+)'", block)[1]
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", block))
        body = text[text.index(f".entry {name}") :]
        body = body[: body.find(".entry ", 10)] if body.find(".entry ", 10) > 0 else body
        threads, shared = launches[name]
        reports.append(
            KernelReport(
                name="paged_attention" if name == _MOSAIC_NAME else name,
                registers=int(re.search(r"Used (\d+) registers", block)[1]),
                spill_bytes=spills,
                shared_bytes=shared,
                threads=threads,
                wide_copies=len(
                    re.findall(r"cp\.async\.c[ag]\S+ \[.*\], 0x10|cp\.async\.bulk|\.v4\.(?:b32|u32|f32)|\.v2\.b64", body)
                ),
                tensor_core=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", body)),
            )
        )
    return reports


def compile_cases(cases: list[CompileCase], *, timeout: float = 1800.0) -> list[dict]:
    """Compiles cases, one process per target and group, and gathers `{"case", "kernels" or "error"}` in their order.

    Raises:
      RuntimeError: the tools are missing.
    """
    reason = missing_tools()
    if reason is not None:
        raise RuntimeError(reason)
    results: dict[int, dict] = {}
    for group in sorted({(case.arch, case.implementation) for case in cases}):
        todo = [i for i, case in enumerate(cases) if (case.arch, case.implementation) == group]
        while todo:
            done, message = _run_process([cases[i] for i in todo], timeout)
            for i, outcome in zip(todo, done):
                results[i] = {"case": cases[i], **outcome}
            todo = todo[len(done) :]
            if todo:
                results[todo[0]] = {"case": cases[todo[0]], "error": f"the compiler ended the process: {message}"}
                todo = todo[1:]
    return [results[i] for i in range(len(cases))]


def _run_process(cases: list[CompileCase], timeout: float) -> tuple[list[dict], str]:
    """Outcomes of the leading cases that one process got through, and the end of its error output."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2")
    environment["PATH"] = os.pathsep.join([str(pathlib.Path(find_ptxas()).parent), environment.get("PATH", "")])
    paths = [str(pathlib.Path(__file__).parents[1]), *(p for p in sys.path if p)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        json.dump([dataclasses.asdict(case) for case in cases], spec)
        spec.flush()
        made = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.tools.compile_report", spec.name],
            capture_output=True, text=True, timeout=timeout, env=environment,
        )  # fmt: skip
    return [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")], made.stderr[-2000:]


def main(path: str) -> None:
    """Compiles the cases of a JSON file, all of one target, and prints one line of JSON each."""
    for fields in json.loads(pathlib.Path(path).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                reports = compile_case(CompileCase(**fields), pathlib.Path(folder))
                outcome = {"kernels": [dataclasses.asdict(report) for report in reports]}
            except Exception as error:  # the report is the result: one case that fails must not hide the others
                outcome = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
