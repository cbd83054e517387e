"""What people are shown of a traced program: the type of a value, and the line that computed it."""

import pathlib
from typing import Any

import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize

from dpoptax._jaxprs import subprograms

# What a user's own line is not in.
_LIBRARY_FOLDERS = str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(optax.__file__).parent)
_FRAME_LIMIT = 100


def type_text(atom: Any) -> str:
    """Its shape and dtype, in short."""
    return atom.aval.str_short()


def source_of_result(jaxpr: Jaxpr, atom: Var | Literal) -> str:
    """The line that computed a result, in the function that the step called for it."""
    for eqn in jaxpr.eqns:
        for index, out in enumerate(eqn.outvars):
            if atom is out:
                inner = subprograms(eqn.params)
                same = len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars)
                own = same and source_of_result(inner[0], inner[0].outvars[index])
                return own or source_line(eqn) or source_line(eqn, inner=True)
    return ""


def source_line(eqn: JaxprEqn, *, inner: bool = False) -> str:
    """File, line and function that an operation is from, the user's own unless the `inner`most."""
    lines = reversed(summarize(eqn.source_info, _FRAME_LIMIT).splitlines())
    found = (each for each in lines if inner or not each.startswith(_LIBRARY_FOLDERS))
    return pathlib.PurePath(next(found, "")).name
