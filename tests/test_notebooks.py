"""The notebooks run from top to bottom, and the files with their results are made from their text."""

import ast
import base64
import importlib.util
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest

from jaxkv.weights.default_model import default_model_path

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
NEEDS_MODEL = ("01_why_a_kv_cache",)
COUNTS_ONLY = ("02_paged_cache", "03_generate_inside_jit")  # pages and steps, neither times nor exact bits
MAX_KIB = 1024

for needed in ("jupytext", "nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(needed)

import matplotlib.image  # noqa: E402  (needed, see above)
import nbformat  # noqa: E402  (comes with nbclient)


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need_the_default_model() -> None:
    """Fetches it if it is not there; where it cannot be fetched the test is skipped, but not in CI."""
    try:
        default_model_path()
    except ConnectionError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_there_are_five() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_made_from_its_text(name: str, runner) -> None:
    made, text = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4), runner.read(name)
    assert [(c.cell_type, c.source) for c in made.cells] == [(c.cell_type, c.source) for c in text.cells], (
        f"python notebooks/run.py {name}"
    )
    nbformat.validate(made)


def committed(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def checks(source: str) -> list[ast.stmt]:
    """The statements of a cell that always run and compare something with what the notebook computed: `assert` or NumPy's."""
    found = []
    for statement in ast.parse(source).body:
        asserts = isinstance(statement, ast.Assert) and any(isinstance(node, ast.Name) for node in ast.walk(statement.test))
        if asserts or (isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("np.testing.assert_")):
            found.append(statement)
    return found


def is_picture(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a PNG with more than one colour, or HTML with an SVG that has shapes in it."""
    data = output.get("data", {})
    if "image/png" in data:
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(data["image/png"])), format="png")
        return len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 2
    return bool(re.search(r"<svg\b.*<(rect|path|circle|polyline)\b.*</svg>", data.get("text/html", ""), re.DOTALL))


def kinds(cell: nbformat.NotebookNode) -> set[str]:
    """What a cell shows: "stdout" for what it prints, and the MIME types of its other outputs."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.get("name", output.output_type): None})}


@pytest.mark.parametrize("name", NAMES)
def test_its_results_are_those_of_its_code(name: str, runner) -> None:
    """Executing writes the digest of the code; whoever edits a cell afterwards, in whichever file, has to execute again."""
    made = committed(name)
    assert made.metadata["results_of"] == runner.digest(made) == runner.digest(runner.read(name)), (
        f"python notebooks/run.py {name}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_was_run_once_from_top_to_bottom_without_complaints(name: str) -> None:
    code = code_cells(committed(name))
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [kind for cell in code for kind in kinds(cell) if kind in ("error", "stderr")]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MAX_KIB * 1024


@pytest.mark.parametrize("name", NAMES)
def test_it_checks_its_results_and_shows_them(name: str) -> None:
    """At least one check always runs, and the picture of at least one output can be seen."""
    code = code_cells(committed(name))
    assert [check for cell in code for check in checks(cell.source)], "no check at the top level of a cell"
    assert [output for cell in code for output in cell.outputs if is_picture(output)], "no picture"


def test_a_check_that_may_not_run_or_cannot_fail_does_not_count() -> None:
    assert not checks("assert True")
    assert not checks("if x:\n    assert x")
    assert not checks("# assert x\ny = 'assert'")
    assert len(checks("assert x\nnp.testing.assert_allclose(x, y)")) == 2


@pytest.mark.filterwarnings("default")  # of the Jupyter machinery, not ours
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name: str, runner, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    if name not in COUNTS_ONLY:
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    if name in NEEDS_MODEL:
        need_the_default_model()
    made = runner.execute(name, timeout=900)
    assert list(map(kinds, code_cells(made))) == list(map(kinds, code_cells(committed(name)))), (
        f"python notebooks/run.py {name}"
    )
