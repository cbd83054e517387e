"""Whether indices name no example twice: it would be in two rows, each of them clipped alone."""

import enum
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._bookkeeping.program import type_of


class Entries(enum.Enum):
    """How the entries of an array are to each other."""

    DISTINCT = enum.auto()  # as those of arguments are taken to be
    EQUAL = enum.auto()
    UNKNOWN = enum.auto()


# Some or all entries of the first operand, each once.
_SELECTING = {
    *("copy", "copy_p", "dynamic_slice", "reshape", "rev", "sharding_constraint", "slice"),
    *("squeeze", "transpose"),
}
_ENTRY_BY_ENTRY = {"add", "div", "max", "min", "mul", "rem", "select_n", "sub"}


def entries(eqn: JaxprEqn, given: Sequence[Entries]) -> list[Entries]:
    """Of each result of an operation, by those of its operands."""
    name, size = eqn.primitive.name, _size(eqn.outvars[0])
    given = [
        Entries.EQUAL if _size(v) == 1 else each for v, each in zip(eqn.invars, given, strict=True)
    ]
    if name == "sort":
        return given
    found = Entries.UNKNOWN
    if name == "iota" and len(eqn.params["shape"]) == 1:
        found = Entries.DISTINCT
    elif name in _SELECTING or _is_kept(eqn):
        found = given[0]
    elif name in {"broadcast_in_dim", *_ENTRY_BY_ENTRY} and set(given) == {Entries.EQUAL}:
        found = Entries.EQUAL
    elif name in ("add", "sub") and set(given) == {Entries.DISTINCT, Entries.EQUAL}:
        found = Entries.DISTINCT
    elif name == "select_n" and set(given[1:]) == {Entries.DISTINCT}:
        found = Entries.DISTINCT  # such as indices of which the negative ones count from the end
    elif name == "gather" and set(given) == {Entries.DISTINCT} and size <= _size(eqn.invars[1]):
        found = Entries.DISTINCT
    return [found] * len(eqn.outvars)


def _is_kept(eqn: JaxprEqn) -> bool:
    """Whether all entries are there once more, in another shape or type."""
    if eqn.primitive.name == "broadcast_in_dim":
        return _size(eqn.outvars[0]) == _size(eqn.invars[0])
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (type_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    whole = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after))
    return whole and after.itemsize >= min(4, before.itemsize)


def name_each_once(indices: Var | Literal, entries: Entries) -> bool:
    """Whether indices may look up rows."""
    return _size(indices) == 1 or entries is Entries.DISTINCT


def _size(atom: Var | Literal) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
