"""The plan of the house: which folder imports which, and how large a file, a function and a list of parameters may be.

Everything is read from the source text. `NOT_YET` lists what breaks a rule at present; an entry that breaks it no longer has to go.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxkv", "pallas_kernels", "benchmarks")
MAX_LINES = 300  # of a file
MAX_FUNCTION = 60  # lines of a function, its docstring included
MAX_PARAMETERS = 10  # of a function that is not exported; `self` and `cls` do not count
MAX_FILES = 6  # directly in jaxkv/
MIN_SENTENCES = 3  # of the docstring of a folder's __init__.py

NOT_YET: dict[str, set[str]] = {
    "lines": set(),
    "function": set(),
    "parameters": set(),
    "docstring": set(),
}

# Every file or folder of jaxkv, and what it may import besides itself; "jaxkv" is the public package.
MAY_IMPORT = {
    "config": "",
    "programs": "",
    "sharding": "config",
    "ops": "config pallas_kernels",
    "cache": "config sharding ops pallas_kernels",
    "families": "config",
    "model": "config sharding ops cache pallas_kernels",
    "weights": "config programs sharding families model",
    "decode": "config programs sharding ops cache model pallas_kernels",
    "rl": "config programs sharding ops model decode",
    "text": "",
    "engine": "config programs sharding ops cache model weights decode text pallas_kernels",
    "viz": "config cache model decode",
    "hf": "config programs cache model weights decode rl text",
    "bench": "config programs cache model jaxkv",
    "cli": "config programs cache model weights decode text viz bench jaxkv",
    "__main__": "cli",
    "__init__": "config programs ops cache model weights decode rl text hf engine viz",  # the last for type checkers alone
}
# A cache and a result draw themselves in a notebook, and load what draws them only then.
LOADED_WHEN_DRAWN = {("cache/paged_kv_cache.py", "viz"), ("decode/outputs.py", "viz")}


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


@pytest.mark.parametrize("name", ["page_pool", "prefix_cache", "sequence", "params", "outputs", "batch", "scheduler"])
def test_the_hosts_bookkeeping_knows_nothing_of_jax(name: str) -> None:
    """Neither jax nor anything that imports it; NumPy neither."""
    for line, imported_name in imported(ROOT / "jaxkv" / "engine" / f"{name}.py"):
        head, *rest = imported_name.split(".")
        assert head not in ("jax", "jaxtyping", "numpy"), f"{name}.py:{line} imports {imported_name}"
        known = ("page_pool", "prefix_cache", "sequence", "params", "outputs", "batch", "scheduler")
        assert head != "jaxkv" or (rest[0] == "engine" and rest[1] in known), f"{name}.py:{line} imports {imported_name}"


def test_the_package_loads_no_picture_code() -> None:
    code = "import sys, jaxkv; print([m for m in sys.modules if m.startswith('jaxkv.viz') or m == 'matplotlib'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sources("jaxkv") + sources("pallas_kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_at_run_time(path: Path) -> None:
    for line, name in imported(path):
        assert name.split(".")[0] != "torch", f"{path.relative_to(ROOT)}:{line} imports {name}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def check_offenders(rule: str, found: dict[str, str]) -> None:
    """The offenders, name to what is wrong, are exactly those that are known."""
    known = NOT_YET[rule]
    new = [f"{name}: {what}" for name, what in sorted(found.items()) if name not in known]
    assert not new, "\n".join(["these break the rule:", *new])
    assert not known - found.keys(), f"these keep the rule now, take them out of NOT_YET: {sorted(known - found.keys())}"


def functions(tree: ast.AST, outside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Qualified name and node of every function, those within classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        name = outside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outside}.{node.name}" if outside else node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, name)


def all_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """ "path:qualified name" and node of every function of the packages."""
    for path in (path for package in PACKAGES for path in sources(package)):
        for name, node in functions(ast.parse(path.read_text())):
            yield f"{name_of(path)}:{name}", node


def exported() -> set[str]:
    """ "path:qualified name" of what the packages export: functions, and classes, whose methods users call."""
    names = set()
    for package in map(importlib.import_module, ("jaxkv", "jaxkv.viz", "pallas_kernels")):
        for value in (getattr(package, name) for name in package.__all__):
            if hasattr(value, "__qualname__"):
                names.add(f"{value.__module__.replace('.', '/')}.py:{value.__qualname__}")
    return names


def test_files_stay_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for package in PACKAGES for path in sources(package)}
    check_offenders("lines", {name: f"{n} lines, {MAX_LINES} are allowed" for name, n in lines.items() if n > MAX_LINES})


def test_functions_stay_short() -> None:
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in all_functions()}
    check_offenders(
        "function", {name: f"{n} lines, {MAX_FUNCTION} are allowed" for name, n in lines.items() if n > MAX_FUNCTION}
    )


def test_functions_take_few_parameters() -> None:
    """Those that are exported may take what a user may want to say."""
    public, counts = exported(), {}
    for name, node in all_functions():
        a = node.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x is not None]
        if name not in public and name.rpartition(".")[0] not in public:
            counts[name] = len(names) - (names[:1] in (["self"], ["cls"]))
    assert len(public) > 30
    too_many = {name: f"{n} parameters, {MAX_PARAMETERS} are allowed" for name, n in counts.items() if n > MAX_PARAMETERS}
    check_offenders("parameters", too_many)


def test_every_folder_says_what_it_is_for() -> None:
    """In whole sentences: what it holds, what it knows nothing of, where to begin reading."""
    found = {}
    for path in (path for package in PACKAGES for path in sources(package) if path.name == "__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentences = len(re.findall(r"[.?!](?=\s|$)", text))
        if sentences < MIN_SENTENCES:
            found[name_of(path)] = f"{sentences} sentences, {MIN_SENTENCES} are the least"
    check_offenders("docstring", found)


def test_the_package_is_made_of_folders() -> None:
    files = sorted(path.name for path in (ROOT / "jaxkv").iterdir() if path.is_file())
    assert len(files) <= MAX_FILES, files


@pytest.mark.parametrize("package", ["jaxkv", "pallas_kernels"])
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("init", [p for p in sources("jaxkv") + sources("pallas_kernels") if p.name == "__init__.py"])
def test_no_module_hides_behind_a_name_that_its_package_exports(init: Path) -> None:
    package = importlib.import_module(".".join(init.parent.relative_to(ROOT).parts))
    exported = {name for name in vars(package) if not isinstance(getattr(package, name), ModuleType)}
    modules = {p.stem if p.is_file() else p.name for p in init.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not exported & modules
