"""Tests that every notebook runs by its own first cell, and is stored compactly."""

import importlib.util
import json
from pathlib import Path

import pytest

REPOSITORY = "dpoptax/dpoptax/blob/main"
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _code(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Returns a function that runs a cell in a folder, and returns its commands instead of them."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    Config = pytest.importorskip("traitlets.config").Config

    def run(cell, folder, *, installed):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
        settings = Config(HistoryManager={"enabled": False})
        shell, commands = interactiveshell.InteractiveShell(config=settings), []
        shell.system = lambda line: commands.append(shell.var_expand(line))
        for name in ("cd", "pip"):
            add = lambda line, name=name: commands.append(f"{name} {line}")  # noqa: E731
            shell.register_magic_function(add, magic_name=name)
        shell.run_cell(cell, store_history=False).raise_error()
        return commands

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_installs_the_copy_around_it_or_the_repository(path, told, tmp_path):
    """Checks a notebook inside a copy of the repository, and one without a copy, as on Colab."""
    cell = _code(path)[0]
    needs_copy = any("from experiments" in later for later in _code(path))
    address = "https://github.com/dpoptax/dpoptax"
    assert told(cell, tmp_path, installed=True) == []
    alone = told(cell, tmp_path, installed=False)
    around = told(cell, path.parent, installed=False)
    upgrade = "pip install --quiet --upgrade pip"
    install = "pip install --quiet --editable . --group experiments"
    if needs_copy:
        clone = f"git clone --quiet --depth 1 {address}"
        assert alone == [clone, "cd dpoptax", upgrade, install]
        assert around == [f"cd {ROOT}", upgrade, install]
    else:
        assert alone == [f'pip install --quiet "dpoptax[train] @ git+{address}"']
        assert around == [f'pip install --quiet "dpoptax[train] @ {ROOT.as_uri()}"']


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes longest
    # The folder of the files that a notebook writes.
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_clean_outputs(path):
    assert path.stat().st_size < 200_000
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    head = "".join(cells[0]["source"])
    assert head.startswith("# ")
    assert (
        f"colab.research.google.com/github/dpoptax/dpoptax/blob/main/notebooks/{path.name}" in head
    )
    assert "calibrate(" not in "".join(_code(path))  # PrivacyPlan does it
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("assert " in "".join(cell["source"]) for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
