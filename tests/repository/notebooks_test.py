"""Tests that every notebook runs from top to bottom and is stored compactly."""

import json
from pathlib import Path

import pytest

REPOSITORY = "dpoptax/dpoptax/blob/main"
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes longest
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_clean_outputs(path):
    assert path.stat().st_size < 200_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    head = "".join(cells[0]["source"])
    assert head.startswith("# ")
    assert (
        f"colab.research.google.com/github/dpoptax/dpoptax/blob/main/notebooks/{path.name}" in head
    )
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("assert " in "".join(cell["source"]) for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
