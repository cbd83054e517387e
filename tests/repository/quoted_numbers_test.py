"""Tests that pages quote the numbers of their records.

A comment `<!-- record: PATH#SECTION -->` names a record, relative to `experiments/results`, or
another page that a command fills. It belongs to its own paragraph, or to the next block if it is
alone. Each number there must be in the named section of the record, after rounding to the
digits of the page.
"""

import re
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Pages whose tables of numbers all have a record.
OF_RECORDS = ("results/index.md", "results/speed.md", "developers/tpu-gpu.md")

_MARK = re.compile(r"<!-- record: (\S+?\.md)(?:#(\S+))? -->")
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: ± \d+(?:\.\d+)?)?")


def _slug(heading):
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def _section(text, slug):
    """Returns the text below a heading, up to the next heading of its level or above."""
    if not slug:
        return text
    text = re.sub(r"```.*?```", lambda code: code[0].replace("#", " "), text, flags=re.DOTALL)
    headings = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    (begin,) = [i for i, found in enumerate(headings) if _slug(found[2]) == slug]
    level = len(headings[begin][1])
    ends = [found.start() for found in headings[begin + 1 :] if len(found[1]) <= level]
    return text[headings[begin].end() : min(ends, default=len(text))]


def _numbers(text):
    """Returns the numbers of a text, each with its standard deviation or error if it has one."""
    text = re.sub(r"(?:`[^`]*`|\]\([^)]*\)|\*\*|\s)+", " ", text)
    return [
        tuple(Decimal(part.replace(",", "")) for part in found.rstrip(",").split(" ± "))
        for found in _NUMBER.findall(text)
    ]


def _rounds_to(number, quoted):
    return len(number) >= len(quoted) and all(
        abs(a - b) <= Decimal(5).scaleb(b.as_tuple().exponent - 1)
        for a, b in zip(number, quoted, strict=False)
    )


def _marked(text):
    """Returns pairs: the marks of a paragraph or table, and its text."""
    found, waiting = [], []
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        marks = waiting + _MARK.findall(block)
        rest = _MARK.sub("", block)
        waiting = [] if rest.strip() else marks
        if marks and rest.strip():
            found.append((marks, rest))
    return found


def _missing(text, read):
    """Returns the numbers of marked blocks that are not in the records."""
    missing = []
    for marks, block in _marked(text):
        record = [n for path, slug in marks for n in _numbers(_section(read(path), slug))]
        missing += [
            (marks, " ± ".join(map(str, quoted)))
            for quoted in _numbers(block)
            if not any(_rounds_to(number, quoted) for number in record)
        ]
    return missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_quoted_numbers_are_in_records(path):
    text = path.read_text("utf-8")
    assert not _missing(text, lambda name: (RESULTS / name).read_text("utf-8"))


@pytest.mark.parametrize("name", OF_RECORDS)
def test_each_table_names_its_record(name):
    text = (ROOT / "docs" / name).read_text("utf-8")
    tables = [block for block in re.split(r"\n\s*\n", text) if "--:|" in block]
    marked = [block.strip() for _, block in _marked(text)]
    assert tables
    assert [table for table in tables if table.strip() not in marked] == []


RECORD = (
    "# A\n\n| x | 83.90 ± 3.66 | 1,434 |\n\n## B\n\n| y | 0.5 | +2.1 |\n\n# C\n\n| z | 7.25 |\n"
)


@pytest.mark.parametrize(
    ("quoted", "missing"),
    [
        ("83.9 ± 3.7 and 1434", []),
        ("84 and 0.5", []),
        ("85.2 ± 2.7", ["85.2 ± 2.7"]),
        ("83.9 ± 2.7", ["83.9 ± 2.7"]),
        ("0.55", ["0.55"]),
        ("7.25", ["7.25"]),
        ("`7.25` [text](7.25.md)", []),
    ],
)
def test_detects_numbers_that_are_not_in_the_record(quoted, missing):
    for text in (f"<!-- record: r.md#a -->\n\n{quoted}", f"{quoted} <!-- record: r.md#a -->"):
        assert [number for _, number in _missing(text, lambda _: RECORD)] == missing
