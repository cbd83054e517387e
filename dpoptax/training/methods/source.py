"""The text of what a class is made of, for classes whose module has no name of its own."""

import ast
import functools
import hashlib
from pathlib import Path

UNNAMED = "<run_path>"
"""The module of what config files define."""


@functools.cache
def source_sha256(kind: type) -> str:
    """The first letters of a SHA-256 of the statements that a class of a config file is made of.

    Its own, those of what it names in its file, and of what these name; and so of the classes that
    it inherits from, where they are of config files, the others by their names. What the file says
    beside them, such as which run to train, may change. A class without a function of its own has
    no file, and counts by its name. Once for each class: the file may change while a run goes on.
    """
    digest = hashlib.sha256()
    for each in kind.__mro__:
        statements = _statements(each) if each.__module__ == UNNAMED else ""
        digest.update(f"{each.__qualname__}\n{statements}\n".encode())
    return digest.hexdigest()[:12]


def _statements(kind: type) -> str:
    file = _file(kind)
    if file is None:
        return ""
    text = file.read_text(encoding="utf-8")
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


def _file(kind: type) -> Path | None:
    """The file of a class's functions."""
    for value in vars(kind).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        code = getattr(function, "__code__", None)
        if code is not None and (file := Path(code.co_filename)).is_file():
            return file
    return None


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
