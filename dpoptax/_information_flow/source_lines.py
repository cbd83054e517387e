"""What people are shown of a traced program: the type of a value, and the line that computed it."""

import pathlib
from typing import Any

import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize

from dpoptax._ghost_clipping.trace.derived_values import inside

# What a user's own line is not in.
_PACKAGES = str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(optax.__file__).parent)
_FRAMES = 100


def in_short(atom: Any) -> str:
    """Its shape and dtype, in short."""
    return atom.aval.str_short()


def where(jaxpr: Jaxpr, atom: Var | Literal) -> str:
    """The line that computed a result, in the function that the step called for it."""
    for eqn in jaxpr.eqns:
        for index, out in enumerate(eqn.outvars):
            if atom is out:
                inner = inside(eqn.params)
                same = len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars)
                own = same and where(inner[0], inner[0].outvars[index])
                return own or line(eqn) or line(eqn, inner=True)
    return ""


def line(eqn: JaxprEqn, *, inner: bool = False) -> str:
    """File, line and function that an operation is from, the user's own unless the `inner`most."""
    lines = reversed(summarize(eqn.source_info, _FRAMES).splitlines())
    found = (each for each in lines if inner or not each.startswith(_PACKAGES))
    return pathlib.PurePath(next(found, "")).name
