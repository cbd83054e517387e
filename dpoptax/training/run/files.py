"""Writes strict JSON and tables, and identifies versions and code."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dpoptax
from dpoptax.training.errors import ConfigError

FIELDS = ("step", "epsilon", "seconds")
"""The fields of every record, besides its metrics."""

STATEMENT = "statement.txt"
"""The file with the guarantee of a run in plain language."""


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns strict JSON of `plain` values."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """Converts a value or dataclass to JSON values. NaN and infinities become None."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


def write_json(path: Path, value: Any, *, secret: bool = False) -> None:
    """Writes `value` to `path` atomically. Only the owner can read a `secret` file."""
    write_text(path, to_json(value, indent=2) + "\n", secret=secret)


def write_text(path: Path, text: str, *, secret: bool = False) -> None:
    """Writes a text to `path` atomically. Only the owner can read a `secret` file."""
    partial = path.with_name(path.name + ".partial")
    if secret:
        make_secret(partial)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def make_secret(path: Path) -> None:
    """Replaces a file with an empty one that only its owner can read."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)


def params_sha256(params: Any) -> str:
    """Returns the SHA-256 over all leaves, in the order of `jax.tree.leaves`."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def described_file(path: Path) -> str:
    """Returns the name of a file and the SHA-256 of its bytes, for a statement."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{path.name}, SHA-256 of the file: {digest}"


def versions() -> dict[str, str]:
    """Returns the package versions that affect the numbers of a run."""
    packages = ("dpoptax", "jax", "jaxlib", "optax", "flax", "numpy", "dp-accounting")
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"python": platform.python_version(), **found}


@functools.cache
def source_sha256() -> str:
    """Returns the SHA-256 over dpoptax's source files."""
    digest = hashlib.sha256()
    (package,) = map(Path, dpoptax.__path__)
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table with aligned columns."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def check_count(name: str, value: int) -> None:
    """Raises a `ConfigError` unless `value` is at least 1."""
    if value < 1:
        raise ConfigError(f"`{name}` must be at least 1, got {value}.")
