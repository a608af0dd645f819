"""Imports run one way, and files stay readable: checked on the source text, one line a folder."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 350

# Every file or folder of jaxkv, and what it may import besides itself; "jaxkv" is the public package.
MAY_IMPORT = {
    "config": "",
    "sharding": "config",
    "ops": "config pallas_kernels",
    "cache": "config sharding ops",
    "families": "config",
    "model": "config sharding ops cache pallas_kernels",
    "weights": "config sharding families model",
    "decode": "config ops cache model pallas_kernels",
    "rl": "config ops model decode",
    "text": "",
    "viz": "config cache model decode",
    "hf": "config cache model weights decode rl text",
    "bench": "config cache model jaxkv",
    "cli": "config cache model weights decode text viz bench jaxkv",
    "__main__": "cli",
    "__init__": "config cache model weights decode rl hf viz",  # the last for type checkers alone: it is loaded on demand
}
# A cache and a result draw themselves in a notebook, and load what draws them only then.
LOADED_WHEN_DRAWN = {("cache/paged_kv_cache.py", "viz"), ("decode/generate.py", "viz")}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


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
def test_jaxkv_imports_what_its_folder_may(path: Path) -> None:
    inside = path.relative_to(ROOT / "jaxkv")
    part = inside.parts[0].removesuffix(".py")
    assert part in MAY_IMPORT, f"{path} stands nowhere: give {part!r} a line in MAY_IMPORT and in the README's tree"
    allowed = {part, *MAY_IMPORT[part].split()}
    for line, name in imported(path):
        head, *rest = name.split(".")
        target = rest[0] if head == "jaxkv" and rest and rest[0] in MAY_IMPORT else head
        if target in ("jaxkv", "pallas_kernels", "benchmarks", *MAY_IMPORT):
            known = target in allowed or (str(inside), target) in LOADED_WHEN_DRAWN
            assert known, f"{path.relative_to(ROOT)}:{line} imports {name}; {part} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_kernels_know_neither_jaxkv_nor_their_tools(path: Path) -> None:
    tool = path.is_relative_to(ROOT / "pallas_kernels" / "tools")
    for line, name in imported(path):
        assert name.split(".")[0] not in ("jaxkv", "benchmarks"), f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert tool or not name.startswith("pallas_kernels.tools"), f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_the_package_loads_no_picture_code() -> None:
    code = "import sys, jaxkv; print([m for m in sys.modules if m.startswith('jaxkv.viz') or m == 'matplotlib'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sources("jaxkv") + sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_at_run_time(path: Path) -> None:
    for line, name in imported(path):
        assert name.split(".")[0] != "torch", f"{path.relative_to(ROOT)}:{line} imports {name}"


@pytest.mark.parametrize(
    "path", [*sources("jaxkv"), *sources("pallas_kernels"), *sources("benchmarks")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_stay_readable(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it"


@pytest.mark.parametrize("package", ["jaxkv", "pallas_kernels"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("init", [p for p in sources("jaxkv") + sources("pallas_kernels") if p.name == "__init__.py"])
def test_no_module_hides_behind_a_name_that_its_package_exports(init: Path) -> None:
    package = importlib.import_module(".".join(init.parent.relative_to(ROOT).parts))
    exported = {name for name in vars(package) if not isinstance(getattr(package, name), ModuleType)}
    modules = {p.stem if p.is_file() else p.name for p in init.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not exported & modules
