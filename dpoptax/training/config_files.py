"""Runs config files as modules, so that worker processes can run the same files."""

import secrets
import sys
import types
from pathlib import Path
from typing import NamedTuple


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
