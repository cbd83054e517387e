"""The notebook on many devices runs from top to bottom."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "one_device_to_a_pod.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert any("assert" in cell.source for cell in notebook.cells)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
