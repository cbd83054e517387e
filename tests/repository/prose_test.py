"""Tests that documents avoid unidiomatic constructions (docs/developers/style.md)."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "PRIVACY")),
]
AT_MOST = 1.0  # per 1,000 words
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


def test_the_documents_read_like_english():
    lines = [line for path in PAGES for line in _prose(path.read_text("utf-8"))]
    words = sum(len(re.findall(r"[A-Za-z]{2,}", line)) for line in lines)
    found = [(hit, line) for line in lines for hit in _found(line)]
    assert 1000 * len(found) <= AT_MOST * words, found


def test_a_stumbling_sentence_is_found():
    assert _found("Nothing against who learns the key, and mesh is no mesh.") == [
        "is no mesh",
        "against who",
    ]
