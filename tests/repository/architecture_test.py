"""Tests that imports run in one direction: each part imports only the parts below it."""

import ast
import json
import pathlib
import re

import pytest

from benchmarks import layout

ROOT = pathlib.Path(__file__).parents[2] / "dpoptax"
# From bottom to top; see CONTRIBUTING.md. A part may import those before it.
ORDER = (
    "_support.tree", "_support.xla", "_support.figures", "_support.jaxprs", "_support.marks",
    "_support.serialization", "_support", "_pricing", "_release.random",
    "_gradients.points", "sampling", "matrix",
    "_gradients.clip", "_gradients.ghost_clipping", "_gradients.clipped_grad",
    "_gradients.track_reference", "_gradients",
    "_release", "filters", "contrib", "accounting", "sampling._batches",
    "runs", "accounting._privacy_plan", "tables", "users",
    "_release.information_flow", "auditing", "extend", "dpoptax",
    "training.errors", "training.bars", "training.roles",
    "training.cache_folder", "training.config_files", "training.named_configs", "training.data",
    "training.hosts",
    "training",
    "training.methods", "training.models", "training.config", "training.run", "training.fitting",
    "training.several_fits",
    "training.loop", "training.search", "training.audit",
    "training.cli", "integrations",
)  # fmt: skip
# The same order within `_gradients.ghost_clipping`.
GHOST_CLIPPING_ORDER = (
    "precision",
    "cost_model",
    "trace",
    "passes",
    "norms",
    "transformed",
    "plan",
    "planned_uses",
    "sums",
    "backward",
    "streaming",
    "two_turns",
    "explain",
)
# Parts above the public names use only public names.
PUBLIC_ONLY = ("training", "integrations")
# The modules whose names are public; documents import from no other. See docs/api/index.md.
PUBLIC_MODULES = {
    "dpoptax", "dpoptax.accounting", "dpoptax.accounting.selection", "dpoptax.auditing",
    "dpoptax.contrib", "dpoptax.extend", "dpoptax.filters", "dpoptax.filters.spectrum",
    "dpoptax.integrations.kauldron", "dpoptax.integrations.tunix", "dpoptax.matrix",
    "dpoptax.runs", "dpoptax.sampling", "dpoptax.tables", "dpoptax.training",
    "dpoptax.training.data", "dpoptax.training.hosts", "dpoptax.training.methods", "dpoptax.users",
}  # fmt: skip
# These folders of the repository are not installed. They may import all of dpoptax.
NOT_INSTALLED = {"experiments", "benchmarks", "tests"}


def modules():
    """Returns sources by dotted name without the package prefix: `_clip.clip`, `filters`, ``."""
    return layout.read(ROOT)


def wing(module):
    """Returns the part that a module belongs to: the longest name in `ORDER` that contains it."""
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in ORDER), parts[0]) or "dpoptax"


def imports(sources):
    """Returns pairs (module, imported module) within the package, except type-only imports."""
    return layout.imports(sources, for_types=False)


def arrows_up(sources):
    """Returns imports of a part by another part that is not above it."""
    rank = {name: i for i, name in enumerate(ORDER)}
    return [
        f"{a or 'dpoptax'} imports {b or 'dpoptax'}"
        for a, b in imports(sources)
        if wing(a) != wing(b) and rank[wing(b)] >= rank[wing(a)]
    ]


def circle(sources):
    """Returns modules that import each other in a cycle, or None."""
    below = {}
    for a, b in imports(sources):
        if a and b and a != b and not a.startswith(f"{b}."):
            below.setdefault(a, set()).add(b)
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        for other in sorted(below.get(module, ())):
            if found := visit(other):
                return found
        path.pop()
        done.add(module)
        return None

    return next(filter(None, map(visit, sorted(below))), None)


def test_every_module_has_a_place():
    assert {wing(module) for module in modules()} == set(ORDER)


def test_no_import_points_upward():
    assert arrows_up(modules()) == []


def test_ghost_clipping_reads_in_one_direction():
    folder = "_gradients.ghost_clipping."
    ranks = {name: i for i, name in enumerate(GHOST_CLIPPING_ORDER)}
    back = [
        f"{a} imports {b}"
        for a, b in imports(modules())
        if a.startswith(folder)
        and b.startswith(folder)
        and ranks[a.split(".")[2]] < ranks[b.split(".")[2]]
    ]
    assert back == []


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
    sources = {"cli.main": "def study():\n    from experiments.claims import catalog\n"}
    assert uninstalled(sources) == ["cli.main imports experiments.claims"]


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


def test_no_import_cycle():
    assert circle(modules()) is None


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
        ("_gradients.clip.clip", "from dpoptax._release.gaussian import gaussian_noise"),
        ("_gradients.points", "from dpoptax import accounting"),
        ("accounting", "def later():\n    from dpoptax.training import loop"),
        ("sampling", "import dpoptax.matrix"),
    ],
)
def test_detects_upward_import(module, line):
    sources = modules()
    sources[module] += f"\n{line}\n"
    assert len(arrows_up(sources)) == 1


def test_detects_import_cycle():
    sources = modules()
    module = "_gradients.clip.clip"
    sources[module] += "\nfrom dpoptax._gradients.clip.clipping_functions import AutomaticClip\n"
    assert {module, "_gradients.clip.clipping_functions"} <= set(circle(sources))


def test_source_hash_covers_every_file_of_package(tmp_path, monkeypatch):
    from dpoptax.training.run import records

    for folder in ("_release", "training/run"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file.py").write_text("")
    monkeypatch.setattr("dpoptax.__path__", [str(tmp_path)])
    before = records.source_sha256.__wrapped__()
    (tmp_path / "_release" / "file.py").write_text("changed = True")
    assert records.source_sha256.__wrapped__() != before
