"""Describes values of a traced program: their types and source lines."""

import pathlib
from typing import Any

import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize

from dpoptax._support.jaxprs import subprograms

# Lines in these folders are not a user's own.
_LIBRARY_FOLDERS = str(pathlib.Path(__file__).parents[2]), str(pathlib.Path(optax.__file__).parent)
_FRAME_LIMIT = 100


def type_text(atom: Any) -> str:
    """Returns shape and dtype of an array as a short text."""
    return atom.aval.str_short()


def source_of_result(jaxpr: Jaxpr, atom: Var | Literal) -> str:
    """Returns the line that computed a result, in the function that the step called."""
    for eqn in jaxpr.eqns:
        for index, out in enumerate(eqn.outvars):
            if atom is out:
                inner = subprograms(eqn.params)
                same = len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars)
                own = same and source_of_result(inner[0], inner[0].outvars[index])
                return own or source_line(eqn) or source_line(eqn, inner=True)
    return ""


def source_line(eqn: JaxprEqn, *, inner: bool = False) -> str:
    """Returns file, line and function of an equation: the user's own, unless `inner`."""
    lines = reversed(summarize(eqn.source_info, _FRAME_LIMIT).splitlines())
    found = (each for each in lines if inner or not each.startswith(_LIBRARY_FOLDERS))
    return pathlib.PurePath(next(found, "")).name
