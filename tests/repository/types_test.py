"""The public names say what they take and what they return."""

import ast
import importlib
import inspect
import types

import pytest

NAMESPACES = (
    "dpoptax", "dpoptax.accounting", "dpoptax.auditing", "dpoptax.filters", "dpoptax.matrix",
    "dpoptax.sampling", "dpoptax.accounting.selection", "dpoptax.filters.spectrum",
    "dpoptax.users",
)  # fmt: skip


def exported(namespace):
    """What a module defines, and what it hands on by `import x as x`."""
    handed_on = {
        alias.name
        for node in ast.walk(ast.parse(inspect.getsource(namespace)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    return {
        name: value
        for name, value in vars(namespace).items()
        if name in handed_on or getattr(value, "__module__", None) == namespace.__name__
    }


def functions(names):
    """The public functions and methods of the package among some names."""
    for name, value in names.items():
        if name.startswith("_") or not getattr(value, "__module__", "").startswith("dpoptax"):
            continue
        if inspect.isclass(value):
            for part, member in vars(value).items():
                inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
                public = not part.startswith("_") or part in ("__call__", "__init__")
                # What `dataclass` and `NamedTuple` write has no file of its own.
                own = isinstance(inner, types.FunctionType) and inner.__module__ == value.__module__
                if public and own and not inner.__code__.co_filename.startswith("<"):
                    yield f"{name}.{part}", inner
        elif callable(value):
            yield name, inspect.unwrap(value)


def unannotated(function):
    """What of a signature has no annotation."""
    signature = inspect.signature(function)
    found = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty and name not in ("self", "cls")
    ]
    if signature.return_annotation is signature.empty and function.__name__ != "__init__":
        found.append("return")
    return found


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_function_is_annotated(namespace):
    missing = {
        name: found
        for name, function in functions(exported(importlib.import_module(namespace)))
        if (found := unannotated(function))
    }
    assert missing == {}


def test_an_unannotated_parameter_is_found():
    class Geometry:
        def factors(self, norms) -> float:
            return norms

    Geometry.__module__ = Geometry.factors.__module__ = "dpoptax.made_up"
    found = {name: unannotated(f) for name, f in functions({"Geometry": Geometry})}
    assert found == {"Geometry.factors": ["norms"]}
