"""Runs config files as modules, so that worker processes can run the same files."""

import hashlib
import importlib
import inspect
import os
import secrets
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpoptax.training.errors import ConfigError, unknown_name

LOADED: dict[str, tuple[str, bytes]] = {}
"""Path and content of each config file that this process has run, in order.

The key is the name of its module in `sys.modules`, where pickle finds the classes of the file.
"""


def load(path: str) -> types.ModuleType:
    """Runs the file at `path` as a new module."""
    return run(f"<config {secrets.token_hex(8)}>", path, Path(path).read_bytes())


def run(name: str, path: str, source: bytes) -> types.ModuleType:
    """Runs a file that this or another process has read, as the module `name`."""
    module = types.ModuleType(name)
    module.__file__ = path
    # Register the module first, because dataclasses look up the module that defines them.
    sys.modules[name], LOADED[name] = module, (path, source)
    try:
        exec(compile(source, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name], LOADED[name]
        raise
    return module


def named(field: str, name: str, registered: Mapping[str, Any]) -> Any:
    """Returns the registered object `name`, or imports MODULE:FUNCTION.

    Modules in the current folder can also be imported.

    Raises:
        ConfigError: The name is unknown, or the import fails.
    """
    module, _, function = name.rpartition(":")
    if name in registered:
        return registered[name]
    if not module:
        raise unknown_name(field, name, registered)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code can raise any error
        raise ConfigError(
            f"`{field}` must be a registered name or MODULE:FUNCTION, got {name!r}, whose import "
            f"fails with {type(error).__name__}: {error}. Name a module in the current folder or "
            "an installed module."
        ) from error
    if not callable(found):
        raise ConfigError(f"`{field}` must name a function, got {name!r}. Pass MODULE:FUNCTION.")
    return found


def code_digests(**names: str) -> dict[str, str]:
    """Returns source hashes of the modules that fields name as MODULE:FUNCTION."""
    modules = {f: sys.modules[n.rpartition(":")[0]] for f, n in names.items() if ":" in n}
    return {
        f"The code of the {field}": hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
        for field, module in modules.items()
    }
