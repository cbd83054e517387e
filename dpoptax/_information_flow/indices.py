"""Whether indices name no example twice, and keys of noise no noise.

An example would be in two rows, each of them clipped alone; noise would hide two releases.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from itertools import combinations

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace.program import type_of
from dpoptax._information_flow.derivations import Derivations


@dataclasses.dataclass(frozen=True)
class Entries:
    """How the entries of an array are to each other.

    Attributes:
      distinct: whether no two are equal.
      equal: whether all are.
      among: of distinct ones, a bound on the largest minus the smallest, plus one.
      moved: of distinct ones, whether some may be no indices of an axis so long.
      of: of distinct ones, the longest axis that they are distinct on.
    """

    distinct: bool = False
    equal: bool = False
    among: int = 0
    moved: bool = False
    of: float = math.inf


UNKNOWN, EQUAL = Entries(), Entries(equal=True)
GIVEN = Entries(distinct=True)
"""Of arguments: taken to be different indices of whatever they are indices of."""

# Some or all entries of the first operand, each once.
_SELECTING = {"dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose", "unstack"}
_PUT_TOGETHER = {"concatenate", "stack"}
_ENTRY_BY_ENTRY = {"add", "div", "max", "min", "mul", "rem", "select_n", "sub"}


def entries(
    eqn: JaxprEqn, given: Sequence[Entries], numbers: Sequence[Hashable], of: Derivations
) -> list[Entries]:
    """Of each result of an operation, by those of its operands, and by their numbers."""
    name, size = eqn.primitive.name, _size(eqn.outvars[0])
    given = [EQUAL if _size(v) == 1 else each for v, each in zip(eqn.invars, given, strict=True)]
    if name == "sort":
        return list(given)
    found = UNKNOWN
    if name == "iota" and len(eqn.params["shape"]) == 1 and _is_wide(eqn.outvars[0]):
        found = Entries(distinct=True, among=size)
    elif name in _SELECTING or _is_kept(eqn):
        found = given[0]
    elif name.startswith("random_") or (name in _PUT_TOGETHER and is_key(eqn.outvars[0])):
        found = _of_keys(eqn, given, numbers, of)
    elif name in {"broadcast_in_dim", *_ENTRY_BY_ENTRY} and set(given) == {EQUAL}:
        found = EQUAL
    elif name in ("add", "sub") and EQUAL in given and _is_wide(eqn.outvars[0]):
        (other,) = [each for each in given if each != EQUAL]
        found = dataclasses.replace(other, moved=other.distinct)
    elif name == "select_n" and given[1].distinct:
        length = _from_the_end(numbers, of)
        if length is not None and given[1].among <= length:
            found = dataclasses.replace(given[1], of=min(length, given[1].of))
    elif name == "gather" and given[0].distinct and size <= _size(eqn.invars[1]):
        alone = len(type_of(eqn.invars[0]).shape) == 1
        if alone and name_each_once(eqn, given[1]) and _inside(eqn, given[1]):
            found = given[0]
    return [found] * len(eqn.outvars)


def _of_keys(
    eqn: JaxprEqn, given: Sequence[Entries], numbers: Sequence[Hashable], of: Derivations
) -> Entries:
    name, distinct = eqn.primitive.name, any(each.distinct for each in given)
    if name in _PUT_TOGETHER:
        single = all(_size(v) == 1 for v in eqn.invars)
        alone = single or all(each.distinct for each in given)
        pairs = combinations(numbers, 2)
        return Entries(distinct=alone and all(of.differ(*two, single=single) for two in pairs))
    if name == "random_split" and _size(eqn.invars[0]) == 1:
        return Entries(distinct=True)
    if name == "random_fold_in" and given[0] != EQUAL:
        return Entries(distinct=given[0].distinct)
    return Entries(distinct=distinct and name != "random_bits")


def is_integer(atom: Var | Literal) -> bool:
    """Whether it is of whole numbers."""
    return jnp.issubdtype(type_of(atom).dtype, jnp.integer)


def is_key(atom: Var | Literal) -> bool:
    """Whether it is of random keys."""
    return jnp.issubdtype(type_of(atom).dtype, jax.dtypes.prng_key)


def name_each_once(eqn: JaxprEqn, given: Entries) -> bool:
    """Whether what a gather looks up is there once.

    Indices from outside of an axis are dropped, or mean its last entry.
    """
    if _size(eqn.invars[1]) == 1:
        return True
    dropped = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    return given.distinct and max(_lengths(eqn)) <= given.of and (dropped or _inside(eqn, given))


def _inside(eqn: JaxprEqn, given: Entries) -> bool:
    """Whether distinct indices are inside of the axes that a gather looks them up on."""
    return not given.moved and given.among <= min(_lengths(eqn))


def _lengths(eqn: JaxprEqn) -> list[int]:
    shape = type_of(eqn.invars[0]).shape
    return [shape[axis] for axis in eqn.params["dimension_numbers"].start_index_map] or [0]


def _from_the_end(numbers: Sequence[Hashable], of: Derivations) -> int | None:
    """What a `select_n` adds to the negative ones of indices; None where it is another."""
    match [of.what(number) for number in numbers]:
        case [("lt", _, (index, zero), _), _, ("add", _, (moved, length), _)]:
            match of.what(zero), of.what(length):
                case ("literal", _, "0"), ("literal", _, added) if index == moved == numbers[1]:
                    return int(str(added))
    return None


def _is_kept(eqn: JaxprEqn) -> bool:
    """Whether all entries are there once more, in another shape or type."""
    if eqn.primitive.name == "broadcast_in_dim":
        return _size(eqn.outvars[0]) == _size(eqn.invars[0])
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (type_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    whole = is_integer(eqn.invars[0]) and is_integer(eqn.outvars[0])
    return whole and after.itemsize >= min(4, before.itemsize)


def _is_wide(atom: Var | Literal) -> bool:
    """Whether it is of whole numbers that count to more than an array has entries."""
    dtype = type_of(atom).dtype
    return jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4


def _size(atom: Var | Literal) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
