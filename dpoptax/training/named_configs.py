"""Finds the configs that are installed with the package, by name."""

import ast
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

SETS = {"digits": ("dp_sgd", "momentum", "disk", "pmlf", "adaptive_kalman", "non_private")}
"""Configs that are compared by default, by the name of their folder. The first is the baseline."""


def find(name: str) -> tuple[Path, ...]:
    """Returns the files of a set such as `digits`, or the file of a name such as `digits/disk`.

    The result is empty for other names.
    """
    if name in SETS:
        return tuple(_folder() / name / f"{config}.py" for config in SETS[name])
    file = _folder() / f"{name}.py"
    return (file,) if name.partition("/")[0] in SETS and file.is_file() else ()


def listing() -> str:
    """Returns a line per name: the name and the first line of the file's docstring."""
    lines = []
    for folder, configs in SETS.items():
        lines.append(f"{folder:26} The configs {', '.join(configs)}. `train` takes {configs[0]}.")
        for file in sorted((_folder() / folder).glob("*.py")):
            doc = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            lines.append(f"{f'{folder}/{file.stem}':26} {doc.partition(chr(10))[0]}")
    return "\n".join(lines)


def _folder() -> Path:
    # The wheel contains the folder `configs`. An editable installation reads the repository's.
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"
