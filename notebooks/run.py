"""Execute the notebooks from top to bottom and write them with their results.

    python notebooks/run.py [NAME ...]      NAME as in 02_paged_cache; all of them by default

Each is written as plain text (`.py`, jupytext's percent format), which is what one edits; the `.ipynb` beside it is made from it and
carries a digest of the code that made its results.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
NAMES = tuple(path.stem for path in sorted(FOLDER.glob("[0-9][0-9]_*.py")))


def read(name: str) -> nbformat.NotebookNode:
    """A notebook without results, from its text."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata["jupytext"] = {"formats": "ipynb,py:percent"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # so that the file changes only where the notebook does
    return notebook


def digest(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of a notebook's code cells, in their order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def asks_for_widgets(output: nbformat.NotebookNode) -> bool:
    """Whether an output is tqdm's advice to install ipywidgets, which depends on the environment and not on the notebook."""
    return output.output_type == "stream" and output.name == "stderr" and "TqdmWarning: IProgress not found" in output.text


def execute(name: str, *, timeout: int = 600) -> nbformat.NotebookNode:
    """A notebook with its results.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = read(name)
    os.environ["JAXKV_PROGRESS"] = "0"  # how long this machine compiled is no result; kernels inherit it
    client = nbclient.NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not asks_for_widgets(output)]
    notebook.metadata["results_of"] = digest(notebook)
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        begin = time.perf_counter()
        made = execute(name)
        nbformat.write(made, FOLDER / f"{name}.ipynb")
        size = (FOLDER / f"{name}.ipynb").stat().st_size // 1024
        print(f"{name}: {time.perf_counter() - begin:.0f} s, {size} KiB", flush=True)
