"""The notebooks run from top to bottom, and the files with their results are made from their text."""

import importlib.util
import os
from pathlib import Path

import pytest

from jaxkv.weights.default_model import default_model_path

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
NEEDS_MODEL = ("01_why_a_kv_cache",)
MAX_KIB = 1024

for needed in ("jupytext", "nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(needed)

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


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_without_running_it(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), "run from top to bottom, once"
    outputs = [output for c in code for output in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    shown = {kind for o in outputs for kind in o.get("data", {})}
    assert shown & {"image/png", "text/html"}, "a picture"
    assert "assert" in "".join(c.source for c in code), "a result that is checked"
    assert path.stat().st_size < MAX_KIB * 1024


@pytest.mark.filterwarnings("default")  # of the Jupyter machinery, not ours
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name: str, runner, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)  # they measure
    if name in NEEDS_MODEL:
        need_the_default_model()
    made = runner.execute(name, timeout=900)
    assert all(c.execution_count for c in made.cells if c.cell_type == "code")
