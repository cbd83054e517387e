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


def imported(source: str, known: set[str]) -> set[str]:
    """Returns the package's modules that a source imports, also those for types only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inside = name.partition(".")
            while package == "dpoptax" and inside and inside not in known:
                inside = inside.rpartition(".")[0]
            if package == "dpoptax":
                found.add(inside)
    return found


def main() -> None:
    """Prints the table."""
    root = pathlib.Path(sys.argv[1] if sys.argv[1:] else pathlib.Path(__file__).parents[1])
    sources = read(root / "dpoptax")
    lines: dict[str, int] = collections.Counter()
    below: dict[str, set[str]] = collections.defaultdict(set)
    for module, source in sources.items():
        lines[folder_of(module)] += source.count("\n")
        if module:  # the top level exports everything
            others = {folder_of(other) for other in imported(source, set(sources)) if other}
            below[folder_of(module)] |= others - {folder_of(module)}

    @functools.cache
    def floor(folder: str) -> int:
        return 1 + max(map(floor, below[folder]), default=0)

    circles = {(a, b) for a in below for b in below[a] if a in below[b]}
    if circles:
        print("circles:", ", ".join(f"{a} ⇄ {b}" for a, b in sorted(circles) if a < b))
        for a, b in circles:
            below[a].discard(b)
    print(f"{'folder':<20} floor  lines  imports")
    for folder in sorted(lines, key=lambda folder: (floor(folder), folder)):
        others = " ".join(sorted(below.get(folder, ())))
        print(f"{folder:<20} {floor(folder):5d} {lines[folder]:6d}  {others}")
    apart = {"training", "cli"}
    library = sum(count for folder, count in lines.items() if folder not in apart)
    arrows = sum(map(len, below.values()))
    print(
        f"{len(lines)} folders, {max(map(floor, lines))} floors, {arrows} arrows; library "
        f"{library} lines, training and cli {sum(lines.values()) - library}"
    )


if __name__ == "__main__":
    main()
