"""What the README says, runs: its Python here, its test command in `.ci/run`, its command lines as far as their arguments."""

import re
import shlex
from pathlib import Path

import pytest
from tiny import save_model

import jaxkv
from jaxkv.cli.arguments import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("default", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_its_python_runs(default: str, folder: Path, monkeypatch, capsys) -> None:
    if default == "tiny":
        load = jaxkv.load
        monkeypatch.setattr(jaxkv, "load", lambda name: load(folder if name == "default" else name))
    names: dict = {}
    for number, block in enumerate(blocks("python"), 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert names["tokens"].shape == (2, 1)
    assert names["logprobs"].shape == (2, 4, 16)
    assert names["cache"].check() is None


def test_ci_runs_its_test_command() -> None:
    (command,) = [line for block in blocks("bash") for line in block.splitlines() if "pytest" in line]
    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("line", [x for b in blocks("bash") for x in b.splitlines() if re.search(r"(^|[|&] )jaxkv ", x)])
def test_its_command_lines_parse(line: str) -> None:
    arguments = shlex.split(re.split(r"(?:^|[|&] )jaxkv ", line)[-1])
    assert build_parser().parse_args(arguments).command in COMMANDS


def test_its_tree_names_every_part() -> None:
    (tree,) = (b for b in blocks("") if "pallas_kernels/" in b)
    named = set(re.findall(r"\w+(?:\.py|/)", tree))
    for path in (ROOT / "jaxkv").iterdir():
        name = path.name + "/" if path.is_dir() else path.name
        if not name.startswith(("_", ".", "py.typed")):
            assert name in named, f"{name} is missing in the README's tree"
