"""Tests that relative links and images of all Markdown files lead to files and headings."""

import re
import subprocess
import urllib.parse
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(<?(?![a-z][a-z+.-]*:)([^)\s>]+)>?(?: \"[^\"]*\")?\)")


def _files():
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("needs the list of files of a git repository")
    return [ROOT / name for name in listed.stdout.splitlines()]


def _anchors(text):
    """Returns the anchors of a page: of headings, as GitHub and mkdocs build them, and given."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    anchors = set(re.findall(r"\{ *#([\w-]+)|(?:id|name)=\"([\w-]+)\"", text))
    found = {part for pair in anchors for part in pair if part}
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\][(\[][^)\]]*[)\]]", r"\1", heading)
        found.add(re.sub(r"[^\w -]", "", plain.strip().lower()).replace(" ", "-"))
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


def _dead(path, text):
    """Returns the relative links of a page that lead nowhere."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    dead = []
    for link in _LINK.findall(text):
        name, _, anchor = urllib.parse.unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        # Anchors of other pages of the site are checked by `mkdocs build --strict`.
        inside = anchor and target.suffix == ".md" and not target.is_relative_to(ROOT / "docs")
        if not target.exists() or (inside and anchor not in _anchors(target.read_text("utf-8"))):
            dead.append(link)
    return dead


def test_relative_links_lead_to_files():
    dead = {str(path.relative_to(ROOT)): _dead(path, path.read_text("utf-8")) for path in _files()}
    assert {name: links for name, links in dead.items() if links} == {}


def test_detects_dead_links():
    page = ROOT / "experiments" / "README.md"
    text = "[a](config.py) [b](no.py) ![c](../no.png) [d](https://x.org/no) [e](#no) `[f](no)`"
    assert _dead(page, text) == ["no.py", "../no.png", "#no"]
