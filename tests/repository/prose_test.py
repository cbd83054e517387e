"""Tests that prose avoids unidiomatic constructions (docs/developers/testing.md)."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.helpers import slow_but

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "PRIVACY")),
]
PATTERNS = (
    r"\b(?:is|are|was|were) no (?!longer|more than|less|such|need|way|reason)\w+",
    r"\b(?:to|for|from|against|by|of) who\b|\bwho (?:sees|knows|wants|learns|gets|can|has|means)\b",
    r"\bbut for\b|\bbeside\b|\bin (?:the )?place of\b|, too\b|\bstands?\b",
    r"\b[Ww]hat (?:is|are|was|were|has|have|does|did|goes|comes|it|they|a|an|the|each|one)\b",
    r"\bof (?:its|one's|their|your) own\b|\b(?:comes?|came|told) (?:of|by)\b|\bmade of\b",
    r"\b(?:alone|apart)\b[.,;:]",
)


def _prose(text):
    """Returns the lines of a page, except code, tables and indented blocks."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "x", text)
    return [line for line in text.split("\n") if not line.startswith(("|", "    "))]


def _found(line):
    return [match[0] for pattern in PATTERNS for match in re.finditer(pattern, line)]


def _of_code(source):
    """Returns the lines of docstrings and comments of a Python file, except examples."""
    lines = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            lines += re.sub(r"`[^`]*`", "x", ast.get_docstring(node) or "").split("\n")
    return [line for line in lines if not line.strip().startswith((">>>", "..."))]


def _check(lines, at_most):
    words = sum(len(re.findall(r"[A-Za-z]{2,}", line)) for line in lines)
    found = [(hit, line) for line in lines for hit in _found(line)]
    assert 1000 * len(found) <= at_most * words, found


def test_documents_read_like_english():
    _check([line for path in PAGES for line in _prose(path.read_text("utf-8"))], 1.0)


@pytest.mark.parametrize(
    "folder", slow_but(("dpoptax",), ("dpoptax", "tests", "experiments", "benchmarks", "configs"))
)
def test_docstrings_and_comments_read_like_english(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    _check([line for path in paths for line in _of_code(path.read_text("utf-8"))], 1.5)


def test_detects_unidiomatic_sentence():
    assert _found("Nothing against who learns the key, and mesh is no mesh.") == [
        "is no mesh",
        "against who",
    ]
