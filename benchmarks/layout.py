"""Prints the package's folders, their line counts, imports and levels.

    python -m benchmarks.layout [FOLDER]

FOLDER is a checkout; the default is this one. A folder's floor is the length of the longest chain
of imports below it.
"""

import ast
import collections
import functools
import pathlib
import sys
from collections.abc import Iterator


def folder_of(module: str) -> str:
    """Returns the folder or file at the top of the package that holds a module."""
    return module.split(".")[0] or "__init__"


def read(root: pathlib.Path) -> dict[str, str]:
    """Returns the package's sources by dotted module name, without the package name."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        sources[".".join(part for part in parts if part != "__init__")] = path.read_text()
    return sources


@functools.cache
def imported_names(source: str) -> tuple[str, ...]:
    """Returns the names that a source imports, those for types included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def imports(sources: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields pairs (module, imported module) within the package."""
    for module, source in sources.items():
        for name in imported_names(source):
            package, _, inside = name.partition(".")
            while inside and inside not in sources:
                inside = inside.rpartition(".")[0]
            if package == "dpoptax":
                yield module, inside


def main() -> None:
    """Prints the table."""
    root = pathlib.Path(sys.argv[1] if sys.argv[1:] else pathlib.Path(__file__).parents[1])
    sources = read(root / "dpoptax")
    lines: dict[str, int] = collections.Counter()
    below: dict[str, set[str]] = {folder_of(module): set() for module in sources}
    for module, source in sources.items():
        lines[folder_of(module)] += source.count("\n")
    for module, other in imports(sources):
        a, b = folder_of(module), folder_of(other)
        if module and other and a != b:  # the top level exports everything
            below[a].add(b)

    @functools.cache
    def floor(folder: str) -> int:
        return 1 + max(map(floor, below[folder]), default=0)

    print(f"{'folder':<20} floor  lines  imports")
    for folder in sorted(lines, key=lambda folder: (floor(folder), folder)):
        others = " ".join(sorted(below.get(folder, ())))
        print(f"{folder:<20} {floor(folder):5d} {lines[folder]:6d}  {others}")
    print(f"{len(lines)} folders, {max(map(floor, lines))} floors, {sum(lines.values())} lines")


if __name__ == "__main__":
    main()
