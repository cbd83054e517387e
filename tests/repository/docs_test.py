"""Tests that the documentation is correct: code, the support table, and every public name."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import re
import runpy
import textwrap
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "```python" in path.read_text("utf-8"))
# Pages whose code needs a package outside of the group `dev`, or their sections if these need
# different packages. The other sections of such a page run before each of them.
PACKAGES = {
    "examples/fine-tune.md#tunix": "tunix",
    "examples/fine-tune.md#Kauldron": "kauldron",
    "examples/gemma.md": "gemma",
    "examples/keras.md": "keras",
    "guides/check-a-private-run.md#jax_privacy": "jax_privacy",
    "guides/check-a-private-run.md#Opacus": "opacus",
    "guides/check-a-private-run.md#optax.contrib": "optax",
}
MODULES = (
    "dpoptax",
    "dpoptax.accounting",
    "dpoptax.auditing",
    "dpoptax.columns",
    "dpoptax.contrib",
    "dpoptax.extend",
    "dpoptax.filters",
    "dpoptax.matrix",
    "dpoptax.sampling",
    "dpoptax.accounting.selection",
    "dpoptax.filters.spectrum",
    "dpoptax.tables",
    "dpoptax.users",
)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def _blocks(text):
    """Returns the fenced blocks of a page: pairs of language and contents."""
    return [
        (language, textwrap.dedent(body).strip("\n")) for _, language, body in _FENCE.findall(text)
    ]


def _run(text, name):
    """Runs the page's Python in order, and compares its output with the `text` blocks."""
    namespace, printed, same = {"__name__": name}, "", doctest.OutputChecker().check_output
    for language, body in _blocks(text):
        if language == "text" and printed:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert same(body + "\n", printed, flags), f"{name} prints\n{printed}instead of\n{body}"
        printed = ""
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, name, "exec"), namespace)
            printed = out.getvalue()


def _parts():
    """Returns names of pages, or of their sections if these need different packages."""
    pages = [path.relative_to(DOCS).as_posix() for path in PAGES]
    sections = {page: [name for name in PACKAGES if name.startswith(f"{page}#")] for page in pages}
    return [name for page in pages for name in sections[page] or [page]]


def _text(name):
    """Returns the text of a page, or of its section with a heading and those for all packages."""
    page, _, heading = name.partition("#")
    text = (DOCS / page).read_text("utf-8")
    if heading:
        sections = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        assert "```python" in dict(sections)[heading]
        needed = (
            body for own, body in sections if own == heading or f"{page}#{own}" not in PACKAGES
        )
        text = "".join(needed)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("name", _parts())
def test_code_of_page_runs(name, tmp_path, monkeypatch, coarse_prices):
    package = PACKAGES.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: see docs/developers/testing.md")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if package:  # a user does not see those of other packages
            warnings.simplefilter("ignore", DeprecationWarning)
        _run(_text(name), name)


def test_detects_page_with_wrong_output():
    with pytest.raises(AssertionError, match="prints"):
        _run("```python\nprint(1)\n```\n\n```text\n2\n```\n", "planted")


@pytest.mark.slow
def test_readme_loop_runs(coarse_prices):
    blocks = _blocks((ROOT / "README.md").read_text("utf-8"))
    _run("\n".join(f"```{language}\n{body}\n```" for language, body in blocks), "README.md")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 100


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("accuracies", "on-images/accuracies"),
        ("differences", "on-images/differences"),
        ("released-code", "released-code/parts"),
    ],
)
def test_results_figure_equals_record(name, record):
    """The site can only show files below docs, so the page has copies."""
    record = ROOT / "experiments" / "results" / f"{record}.png"
    assert (ROOT / "docs" / "results" / f"{name}.png").read_bytes() == record.read_bytes()


def _public_names(name):
    module = importlib.import_module(name)
    names = {each for each in module.__all__ if not inspect.ismodule(getattr(module, each))}
    return {f"{name}.{each}" for each in names - {"__version__"}}


def test_api_reference_has_every_public_name_once():
    pages = [path.read_text("utf-8") for path in (DOCS / "api").glob("*.md")]
    found = [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    states = {name for name in found if "._" in name}  # on the page of their function
    others = ("dpoptax.training.", "dpoptax.integrations.", "dpoptax.runs.")
    trainer = {name for name in found if name.startswith(others)}
    documented = [name for name in found if name not in {*MODULES, *states, *trainer}]
    assert len(documented) == len(set(documented))
    assert set(documented) == set().union(*map(_public_names, MODULES))


@pytest.mark.slow
def test_support_table_is_up_to_date():
    table = runpy.run_path(str(DOCS / "_tools" / "support_table.py"))
    assert table["table_of_page"]() == table["support_table"]()
