"""Imports run one way, and files stay readable: the walls of the house, checked on the source text."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 350

# Each module may import those on earlier lines; those on one line are mates that do not know of one another.
LAYERS = [
    {"config"},
    {"cache_report"},
    {"cache_text"},
    {"cache_picture"},
    {"output_picture"},
    {"pages"},
    {"kv_cache"},
    {"attention"},
    {"products"},
    {"layers"},
    {"model"},
    {"sampling", "beams"},
    {"step"},
    {"run_state"},
    {"device_scheduler"},
    {"speculative"},
    {"generate"},
    {"score", "beam_search", "naive"},
    {"rollout", "viz"},
    {"families"},
    {"weights"},
    {"auto"},
    {"streaming"},
    {"engine"},
    {"server", "bench"},
    {"cli_generate"},
    {"cli_inspect"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def part_of(path: Path) -> str:
    """The top-level part of jaxkv a file belongs to: its file or folder directly below the package."""
    return path.relative_to(ROOT / "jaxkv").parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, relative imports spelled out, imports inside functions too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(x for x in (base, node.module) if x)
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", sources("jaxkv"), ids=lambda p: str(p.relative_to(ROOT)))
def test_jaxkv_imports_only_from_above(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in RANK, f"{path} is in no layer: add {part!r} to LAYERS and to the README's tree"
    for line, name in imported(path):
        head, *rest = name.split(".")
        if head != "jaxkv":
            continue
        target = rest[0] if rest and rest[0] in RANK else "__init__"
        allowed = RANK[target] < RANK[part] if target != "__init__" else RANK[part] > RANK["engine"]
        assert target == part or allowed, f"{path.relative_to(ROOT)}:{line} imports {name}, which stands below {part}"


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_kernels_know_nothing_of_jaxkv(path: Path) -> None:
    for line, name in imported(path):
        assert name.split(".")[0] != "jaxkv", f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_only_attention_and_above_import_the_kernels() -> None:
    for path in sources("jaxkv"):
        part = part_of(path)
        if any(name.split(".")[0] == "pallas_kernels" for _, name in imported(path)):
            assert RANK.get(part, 0) >= RANK["attention"], f"{path.relative_to(ROOT)} imports pallas_kernels"


@pytest.mark.parametrize("path", sources("jaxkv") + sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_at_run_time(path: Path) -> None:
    bench = ROOT / "jaxkv" / "bench"
    if path == bench / "against_transformers.py" or path.parent == bench / "peers":  # those run in processes of their own
        return
    for line, name in imported(path):
        assert name.split(".")[0] != "torch", f"{path.relative_to(ROOT)}:{line} imports {name}"


@pytest.mark.parametrize("path", sources("jaxkv") + sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_readable(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"


@pytest.mark.parametrize("package", ["jaxkv", "pallas_kernels"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
