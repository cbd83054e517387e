"""Keeps a line of JSON for each run in a file, so that no run is repeated."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def record_once(
    path: Path, fields: Mapping[str, Any], run: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the line of a file with these fields; without one, runs and adds it.

    A new line has the fields, the results of `run`, and its seconds if it returns none.
    """
    for record in read_lines(path):
        if all(record.get(name) == value for name, value in fields.items()):
            return record
    begun = time.monotonic()
    record = {**fields, **run()}
    record.setdefault("seconds", round(time.monotonic() - begun, 1))
    append_lines(path, [record])
    return record


def append_lines(path: Path, records: Iterable[Any]) -> None:
    """Adds records to a file, which may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_lines(path: Path) -> list[Any]:
    """Returns the records of a file, none if it is missing."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
