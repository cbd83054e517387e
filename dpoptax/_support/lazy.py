"""Public names that a package imports on first use."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: str, hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports names on first use.

    A program then imports only the files that it uses. The names are those that the package imports
    under `if TYPE_CHECKING:`, which type checkers read and a program does not run.

    Args:
      package: the name of the package.
      hint: returns the end of the error message for an unknown name.
    """
    module = sys.modules[package]
    checked = next(x for x in ast.parse(inspect.getsource(module)).body if isinstance(x, ast.If))
    imports = [x for x in checked.body if isinstance(x, ast.ImportFrom)]
    home_of = {alias.name: str(x.module) for x in imports for alias in x.names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint(name)}")
        if home_of[name] == package:  # a module of the package
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(module, name, value)  # the next use finds it there
        return value

    names = sorted(home_of)
    return get, lambda: names, names
