"""Identifies the classes of config files by the statements that they are made of."""

import ast
import functools
import hashlib
import importlib.util

from dpoptax.training.config_files import LOADED


@functools.cache
def source_sha256(kind: type) -> str:
    """Returns the first letters of a SHA-256 of the source of a class of a config file.

    It covers the class, the statements of the file that the class refers to, and those that these
    refer to in turn. The rest of the file may change, such as the run that it configures. Base
    classes from elsewhere count by their names.
    """
    digest = hashlib.sha256()
    for each in kind.__mro__:
        statements = _statements(each) if each.__module__ in LOADED else ""
        digest.update(f"{each.__qualname__}\n{statements}\n".encode())
    return digest.hexdigest()[:12]


def _statements(kind: type) -> str:
    text = importlib.util.decode_source(LOADED[kind.__module__].source)
    body = ast.parse(text).body
    needed: set[int] = set()
    waiting = {kind.__qualname__.partition(".")[0]}
    while waiting:
        name = waiting.pop()
        for place, statement in enumerate(body):
            if place not in needed and name in _defined(statement):
                needed.add(place)
                waiting |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    lines = text.splitlines()
    return "\n".join(
        "\n".join(lines[_first_line(body[place]) - 1 : body[place].end_lineno])
        for place in sorted(needed)
    )


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    names: set[str] = set()
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=given):
                names.add(given or name.partition(".")[0])
    return names


def _first_line(statement: ast.stmt) -> int:
    """That of its first decorator, if it has one."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])
