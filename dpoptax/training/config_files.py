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
from typing import Any, NamedTuple

from dpoptax.training.errors import ConfigError, unknown_name


class ConfigFile(NamedTuple):
    """A config file as it was when it was read.

    Attributes:
        module: Name in `sys.modules`, under which pickle finds the classes of the file.
        path: Where the file is.
        source: Its contents.
    """

    module: str
    path: str
    source: bytes


LOADED: dict[str, ConfigFile] = {}
"""The files that this process has run, in order, by the name of their module."""


def load(path: str) -> types.ModuleType:
    """Runs the file at `path` as a new module."""
    return run(ConfigFile(f"<config {secrets.token_hex(8)}>", path, Path(path).read_bytes()))


def run(file: ConfigFile) -> types.ModuleType:
    """Runs a file that was read before, maybe by another process."""
    module = types.ModuleType(file.module)
    module.__file__ = file.path
    # Before the file runs: dataclasses look up the module in which they are defined.
    sys.modules[file.module], LOADED[file.module] = module, file
    try:
        exec(compile(file.source, file.path, "exec"), vars(module))
    except BaseException:
        del sys.modules[file.module], LOADED[file.module]
        raise
    return module


def named(field: str, name: str, registered: Mapping[str, Any]) -> Any:
    """Returns the object that a config names: a registered one, or MODULE:FUNCTION.

    Modules of the current folder are found too.

    Raises:
        ConfigError: An unknown name, or a reference that cannot be imported.
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
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(
            f"`{field}` must be a registered name or MODULE:FUNCTION, got {name!r}, whose import "
            f"fails with {type(error).__name__}: {error}. Name a module in the current folder or "
            "an installed module."
        ) from error
    if not callable(found):
        raise ConfigError(f"`{field}` must name a function, got {name!r}. Pass MODULE:FUNCTION.")
    return found


def code_digests(**names: str) -> dict[str, str]:
    """Returns a hash of each module that a field's MODULE:FUNCTION refers to."""
    modules = {f: sys.modules[n.rpartition(":")[0]] for f, n in names.items() if ":" in n}
    return {
        f"code of the {field}": hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
        for field, module in modules.items()
    }
