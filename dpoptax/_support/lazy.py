"""Public names that a package imports on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, files: Mapping[str, Sequence[str]], hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports names on first use.

    A program then imports only the files that it uses. Type checkers do not see these names, so the
    package also imports them under `TYPE_CHECKING`.

    Args:
      package: the name of the package.
      files: the names that come from each file. A file of the package starts with a dot, and the
        names of "." are its modules.
      hint: returns the end of the error message for an unknown name.
    """
    file_of = {name: file for file, names in files.items() for name in names}

    def get(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        file = file_of[name]
        module = importlib.import_module(file + name if file == "." else file, package)
        value = module if file == "." else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use finds it there
        return value

    names = sorted(file_of)
    return get, lambda: names, names
