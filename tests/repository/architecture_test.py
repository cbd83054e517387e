"""Tests that imports run in one direction: each part imports only the parts below it."""

import ast
import graphlib
import json
import pathlib
import re

import pytest

from benchmarks import layout

ROOT = pathlib.Path(__file__).parents[2] / "dpoptax"
# The folders of the map, from bottom to top. A folder may import those before it.
MAP = (ROOT.parent / "CONTRIBUTING.md").read_text("utf-8").partition("[start:map]")[2]
ORDER = re.findall(r"^\| `(\w+)/?` \|", MAP.partition("[end:map]")[0], re.MULTILINE)
# Parts above the public names use only public names.
PUBLIC_ONLY = ("training", "integrations")
# The modules whose names are public; documents import from no other. See docs/api/index.md.
PUBLIC_MODULES = {
    "dpoptax", "dpoptax.accounting", "dpoptax.accounting.selection", "dpoptax.auditing",
    "dpoptax.columns",
    "dpoptax.contrib", "dpoptax.extend", "dpoptax.filters", "dpoptax.filters.spectrum",
    "dpoptax.integrations.kauldron", "dpoptax.integrations.tunix", "dpoptax.matrix",
    "dpoptax.runs", "dpoptax.sampling", "dpoptax.tables", "dpoptax.training",
    "dpoptax.training.data", "dpoptax.training.hosts", "dpoptax.users",
}  # fmt: skip
# These folders of the repository are not installed. They may import all of dpoptax.
NOT_INSTALLED = {"experiments", "benchmarks", "tests"}


def modules():
    """Returns sources by dotted name without the package prefix: `_clip.clip`, `filters`, ``."""
    return layout.read(ROOT)


def folder(module):
    """Returns the folder or file at the top of the package that holds a module."""
    return module.split(".")[0] or "dpoptax"


def imports(sources):
    """Returns pairs (module, imported module) within the package, type annotations included."""
    return layout.imports(sources)


def arrows_up(sources):
    """Returns imports of a folder by another folder that is not above it."""
    rank = {name: i for i, name in enumerate(ORDER)}
    return [
        f"{a or 'dpoptax'} imports {b or 'dpoptax'}"
        for a, b in imports(sources)
        if rank[folder(b)] > rank[folder(a)]
    ]


def circle(sources):
    """Returns files, or folders, that import each other in a circle, or None.

    Files of two folders are an import of one folder by the other, at each depth.
    """
    below = {}
    for a, b in imports(sources):
        if not (a and b and a != b and not a.startswith(f"{b}.")):
            continue
        below.setdefault(a, set()).add(b)
        here, there = a.split("."), b.split(".")
        same = next((n for n, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), None)
        if same is not None:
            one, other = (f"{'.'.join(each[: same + 1])}/" for each in (here, there))
            below.setdefault(one, set()).add(other)
    try:
        tuple(graphlib.TopologicalSorter(below).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_every_folder_has_a_row_of_the_map():
    assert sorted({folder(module) for module in modules()}) == sorted(ORDER)


def test_no_import_points_upward():
    assert arrows_up(modules()) == []


def uninstalled(sources):
    """Returns imports of modules that the wheel does not contain."""
    found = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            found += [
                f"{module} imports {name}" for name in names if name.split(".")[0] in NOT_INSTALLED
            ]
    return found


def test_package_imports_only_installed_modules():
    assert uninstalled(modules()) == []


def test_detects_import_of_experiments():
    sources = {"cli.main": "def study():\n    from experiments.studies import catalog\n"}
    assert uninstalled(sources) == ["cli.main imports experiments.studies"]


def test_documents_import_only_public_modules():
    texts = {
        str(path.relative_to(ROOT.parent)): path.read_text()
        for pattern in ("*.md", "docs/**/*.md", "configs/**/*.py")
        for path in ROOT.parent.glob(pattern)
    }
    for path in ROOT.parent.glob("notebooks/*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts[path.name] = "\n".join("".join(cell["source"]) for cell in cells)
    private = [
        f"{name}: {module}"
        for name, text in texts.items()
        for module in re.findall(r"(?:from|import) (dpoptax[\w.]*)(?: import|$)", text, re.M)
        if module not in PUBLIC_MODULES and not name.startswith("docs/developers/")
    ]
    assert private == []


def test_no_circle_of_imports():
    assert circle(modules()) is None


def test_no_two_modules_or_classes_share_a_name():
    paths = [path for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    nodes = (node for path in paths for node in ast.parse(path.read_text("utf-8")).body)
    for names in (
        [path.stem.lstrip("_") for path in paths],
        [node.name for node in nodes if isinstance(node, ast.ClassDef)],
    ):
        assert sorted(names) == sorted(set(names))


def test_trainer_cli_and_integrations_use_only_public_names():
    private = [
        f"{a} imports {b}"
        for a, b in imports(modules())
        if a.split(".")[0] in PUBLIC_ONLY and b.startswith("_")
    ]
    assert private == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("_clips.clip", "from dpoptax._release.gaussian import gaussian_noise"),
        ("_pricing.checks", "if TYPE_CHECKING:\n    from dpoptax.sampling._base import Unit"),
        ("_points.points", "from dpoptax import accounting"),
        ("accounting", "def later():\n    from dpoptax.training import train_config"),
        ("sampling", "import dpoptax.matrix"),
    ],
)
def test_detects_upward_import(module, line):
    sources = modules()
    sources[module] += f"\n{line}\n"
    assert len(arrows_up(sources)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("_clips.clip", "from dpoptax._clips.clipping_functions import NormalizedClip"),
        ("matrix._participation", "from dpoptax.matrix._strategies import BandedToeplitz"),
        ("training.run.step", "from dpoptax.training.search import sweep"),
    ],
)
def test_detects_circle_of_imports(module, line):
    sources = modules()
    sources[module] += f"\nif TYPE_CHECKING:\n    {line}\n"
    assert circle(sources) is not None


def test_source_hash_covers_every_file_of_package(tmp_path, monkeypatch):
    from dpoptax.training.run import files

    for folder in ("_release", "training/run"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("")
    monkeypatch.setattr("dpoptax.__path__", [str(tmp_path)])
    before = files.source_sha256.__wrapped__()
    (tmp_path / "_release" / "file.py").write_text("changed = True")
    assert files.source_sha256.__wrapped__() != before
