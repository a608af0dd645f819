"""What the documentation says, runs: its Python, its command lines; its pictures are those of today; the site builds without warnings."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_model

import jaxkv
import pallas_kernels
from jaxkv.cli.arguments import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ELSEWHERE = ("branching.md",)  # tests/test_examples.py runs its Python
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name not in ELSEWHERE)


def blocks(path: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), chat=True)


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_its_python_runs(path: Path, folder: Path, monkeypatch, capsys) -> None:
    load = jaxkv.load
    monkeypatch.setattr(jaxkv, "load", lambda name: load(folder if name == "default" else name))
    names: dict = {}
    for number, block in enumerate(blocks(path, "python"), 1):
        exec(compile(block, f"{path.name}, Python block {number}", "exec"), names)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_its_command_lines_parse(path: Path) -> None:
    for line in (line for block in blocks(path, "bash") for line in block.splitlines()):
        commands = [command.strip() for command in re.split(r"&&|\|", line)]
        for command in commands:
            program, *arguments = shlex.split(command, comments=True)
            if command.startswith("python -m benchmarks."):
                assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file(), f"{path.name}: no program {arguments[1]}"
            elif program == "jaxkv":
                assert build_parser().parse_args(arguments).command in COMMANDS
            else:
                assert program in ("pip", "pytest", "jupyter"), f"{path.name}: nothing tests {command!r}"


def test_what_a_comment_calls_a_measurement_is_a_heading_of_that_page() -> None:
    """A reference reads: docs/measurements.md, "Weight on the left". It may go on in the next line of a comment."""
    headings = {
        path.name: set(re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)) for path in DOCS.glob("measurements*.md")
    }
    assert "Weight on the left" in headings["measurements.md"]
    sources = [
        path for folder in ("jaxkv", "pallas_kernels", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.[pch]*")
    ]
    for path in [ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(p for p in sources if p.suffix in (".py", ".cc", ".h"))]:
        text = re.sub(r"\s*\n\s*(?:#|//)?\s*", " ", path.read_text())
        for page, heading in re.findall(r"docs/(measurements\w*\.md), \"([^\"]+)\"", text):
            assert heading in headings.get(page, set()), (
                f"{path.relative_to(ROOT)} names {heading!r}, no heading of docs/{page}"
            )


def test_folders_that_ci_leaves_out_exist() -> None:
    """Regression: folders that had moved were left out under their old names, and so ran."""
    left_out = re.findall(r"--ignore (\S+)", (ROOT / ".ci" / "run").read_text())
    assert left_out
    assert [name for name in left_out if not (ROOT / name).exists()] == []


def test_the_reference_has_every_public_name_once() -> None:
    named = [line.split(".")[-1] for line in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)]
    public = (set(jaxkv.__all__) - {"viz"}) | set(jaxkv.viz.__all__) | set(jaxkv.engine.__all__) | set(pallas_kernels.__all__)
    assert sorted(named) == sorted(public)


def test_the_reference_says_what_can_be_imported_from_jaxkv_itself() -> None:
    """What stands above the first heading that names a package."""
    above = (DOCS / "api.md").read_text().partition("(`jaxkv.viz`)")[0]
    named = re.findall(r"^::: (\S+)\.(\w+)$", above, re.MULTILINE)
    assert len(named) > 25
    for module, name in named:
        assert getattr(jaxkv, name) is getattr(importlib.import_module(module), name)
    beside = re.findall(r"`(\w+)`", re.sub(r"`jaxkv[.\w]*`|[\s\S]*?Besides,", "", above.partition("##")[0]))
    assert len(beside) >= 8
    assert all(hasattr(jaxkv.text, name) or hasattr(jaxkv.weights, name) for name in beside), beside


def test_its_pictures_are_those_of_today(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path in module.draw(tmp_path):
        assert path.read_text() == (DOCS / "pictures" / path.name).read_text(), f"{path.name}: run python docs/pictures.py"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in (DOCS / "pictures").iterdir()}


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install '.[docs]'")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site" / "api.html").read_text()
    for name in ("generate", "PagedKVCache", "paged_attention"):
        assert re.search(rf'id="[\w.]*\.{name}"', reference), f"{name} is missing in the reference"
    for page in ("concepts.html", "index.html"):
        assert "<svg" in (tmp_path / "site" / page).read_text()
