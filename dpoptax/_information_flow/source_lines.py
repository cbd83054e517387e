"""Describes values of a traced program: their types and source lines."""

import linecache
import pathlib
import re
import sysconfig

import optax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import summarize

from dpoptax._support.jaxprs import subprograms

# Lines in these folders are not a user's own.
_LIBRARY_FOLDERS = str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(optax.__file__).parent)
# Lines in these folders may be, if a user's package is installed.
_INSTALLED_FOLDERS = tuple(
    sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")
)
_TABLES_FOLDER = str(pathlib.Path(__file__).parents[1] / "_random")
_SUPPORT_FOLDER = str(pathlib.Path(__file__).parents[1] / "_support")
_FRAME_LIMIT = 100
_CODE_LENGTH = 60


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
    return pathlib.PurePath(_frame(eqn, inner=inner)).name


def quoted_line(eqn: JaxprEqn) -> str:
    """Returns the user's line of an equation with its code, or an empty text."""
    frame = _frame(eqn)
    found = re.match(r"(.*?):(\d+)", frame)
    code = linecache.getline(found[1], int(found[2])).strip() if found else ""
    if len(code) > _CODE_LENGTH:
        code = f"{code[: _CODE_LENGTH - 1]}…"
    line = pathlib.PurePath(frame).name
    return f"{line}, `{code}`" if code else line


def uses_own_table(eqn: JaxprEqn) -> bool:
    """Returns whether a generator of noise in this package made the equation."""
    # Generators call helpers of `_support`, and so do other modules.
    callers = (each for each in _frames(eqn) if not each.startswith(_SUPPORT_FOLDER))
    return next(callers, "").startswith(_TABLES_FOLDER)


def _frames(eqn: JaxprEqn) -> list[str]:
    """Returns path, line and function of an equation's calls, from the innermost one."""
    return summarize(eqn.source_info, _FRAME_LIMIT).splitlines()[::-1]


def _frame(eqn: JaxprEqn, *, inner: bool = False) -> str:
    """Returns path, line and function: the user's innermost ones, unless `inner`."""
    frames = _frames(eqn)
    if inner:
        return next(iter(frames), "")
    own = [each for each in frames if not each.startswith(_LIBRARY_FOLDERS)]
    return next((f for f in own if not f.startswith(_INSTALLED_FOLDERS)), next(iter(own), ""))
