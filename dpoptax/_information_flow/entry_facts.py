"""Tracks whether indices name an example twice, and whether keys repeat.

An example named twice would be in two rows, each clipped separately. Noise drawn twice would hide
two releases.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from itertools import combinations

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._information_flow.derivations import Derivations
from dpoptax._support.jaxprs import type_of


@dataclasses.dataclass(frozen=True)
class EntryFacts:
    """Says how the entries of an array relate to each other.

    Attributes:
      distinct: whether no two entries are equal.
      equal: whether all entries are equal.
      span: for distinct entries, a bound on the largest minus the smallest, plus one.
      shifted: for distinct entries, whether some may not be indices of an axis of this length.
      axis_length: for distinct entries, the longest axis on which they are distinct.
    """

    distinct: bool = False
    equal: bool = False
    span: int = 0
    shifted: bool = False
    axis_length: float = math.inf


UNKNOWN_FACTS, EQUAL_FACTS = EntryFacts(), EntryFacts(equal=True)
DISTINCT_FACTS = EntryFacts(distinct=True)
"""Facts of arguments, which are assumed to be distinct indices of any axis that they index."""

# These return some or all entries of the first operand, each once.
_SELECTIONS = {"dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose", "unstack"}
_JOIN_PRIMITIVES = {"concatenate", "stack"}
_ARITHMETIC_PRIMITIVES = {"add", "div", "max", "min", "mul", "rem", "select_n", "sub"}


def result_entries(
    eqn: JaxprEqn, given: Sequence[EntryFacts], numbers: Sequence[Hashable], of: Derivations
) -> list[EntryFacts]:
    """Returns the facts of each result, from those of the operands and their numbers."""
    name, size = eqn.primitive.name, _size(eqn.outvars[0])
    given = _single_are_equal(eqn, given)
    # A sort moves the entries of each operand, and keeps all.
    if name == "sort":
        return given
    found = UNKNOWN_FACTS
    # Narrow integers would wrap around and repeat.
    if name == "iota" and len(eqn.params["shape"]) == 1 and _is_wide(eqn.outvars[0]):
        found = EntryFacts(distinct=True, span=size)
    elif name in _SELECTIONS or _keeps_entries(eqn):
        found = given[0]
    elif name.startswith("random_") or (name in _JOIN_PRIMITIVES and is_key(eqn.outvars[0])):
        found = _key_entries(eqn, given, numbers, of)
    elif name in {"broadcast_in_dim", *_ARITHMETIC_PRIMITIVES} and set(given) == {EQUAL_FACTS}:
        found = EQUAL_FACTS
    elif name in ("add", "sub") and EQUAL_FACTS in given and _is_wide(eqn.outvars[0]):
        # One number is added to all, so distinct entries stay distinct, also modulo 2³².
        (other,) = [each for each in given if each != EQUAL_FACTS]
        found = dataclasses.replace(other, shifted=other.distinct)
    elif name == "select_n" and given[1].distinct:
        # JAX adds the length to negative indices. Entries that are less than a length apart stay
        # distinct: −1 and length − 1 are not both among them.
        length = _added_length(numbers, of)
        if length is not None and given[1].span <= length:
            found = dataclasses.replace(given[1], axis_length=min(length, given[1].axis_length))
    # Distinct indices read distinct entries. One index for each result excludes slices.
    elif name == "gather" and given[0].distinct and size <= _size(eqn.invars[1]):
        alone = len(type_of(eqn.invars[0]).shape) == 1
        if alone and indices_are_unique(eqn, given[1]) and _is_within_axes(eqn, given[1]):
            found = given[0]
    return [found] * len(eqn.outvars)


def _key_entries(
    eqn: JaxprEqn, given: Sequence[EntryFacts], numbers: Sequence[Hashable], of: Derivations
) -> EntryFacts:
    """Returns the facts of an array of keys."""
    name, distinct = eqn.primitive.name, any(each.distinct for each in given)
    if name in _JOIN_PRIMITIVES:
        single = all(_size(v) == 1 for v in eqn.invars)
        alone = single or all(each.distinct for each in given)
        # Each operand must have distinct keys, and no two operands may share one.
        pairs = combinations(numbers, 2)
        return EntryFacts(distinct=alone and all(of.differ(*two, single=single) for two in pairs))
    if name == "random_split" and _size(eqn.invars[0]) == 1:
        return EntryFacts(distinct=True)
    if name == "random_fold_in":
        return folded_entries(eqn, given)
    return EntryFacts(distinct=distinct and name != "random_bits")


def _single_are_equal(eqn: JaxprEqn, given: Sequence[EntryFacts]) -> list[EntryFacts]:
    """Replaces the facts of operands with one entry, which a result may repeat."""
    pairs = zip(eqn.invars, given, strict=True)
    return [EQUAL_FACTS if _size(v) == 1 else facts for v, facts in pairs]


def folded_entries(eqn: JaxprEqn, given: Sequence[EntryFacts]) -> EntryFacts:
    """Returns the facts of keys that numbers were folded into."""
    keys, folded = _single_are_equal(eqn, given)
    # Distinct numbers in one key give distinct keys, and so does one number in distinct keys. If
    # both vary, distinct keys are enough, since `fold_in` gives no key twice.
    return EntryFacts(distinct=(folded if keys == EQUAL_FACTS else keys).distinct)


def is_integer(atom: Var | Literal) -> bool:
    """Returns whether the array holds integers."""
    return jnp.issubdtype(type_of(atom).dtype, jnp.integer)


def is_key(atom: Var | Literal) -> bool:
    """Returns whether the array holds random keys."""
    return jnp.issubdtype(type_of(atom).dtype, jax.dtypes.prng_key)


def indices_are_unique(eqn: JaxprEqn, given: EntryFacts) -> bool:
    """Returns whether a gather reads each entry at most once.

    Indices outside of an axis are dropped, or mean its last entry.
    """
    if _size(eqn.invars[1]) == 1:
        return True
    dropped = eqn.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    return (
        given.distinct
        and max(_lengths(eqn)) <= given.axis_length
        and (dropped or _is_within_axes(eqn, given))
    )


def clamped_rows(eqn: JaxprEqn) -> int | None:
    """Returns the number of rows if a gather by row numbers clamps them, or `None`."""
    by_row = 0 in eqn.params["dimension_numbers"].start_index_map
    clamps = eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP
    return type_of(eqn.invars[0]).shape[0] if by_row and clamps else None


def _is_within_axes(eqn: JaxprEqn, given: EntryFacts) -> bool:
    """Returns whether distinct indices are within the axes that a gather reads."""
    return not given.shifted and given.span <= min(_lengths(eqn))


def _lengths(eqn: JaxprEqn) -> list[int]:
    shape = type_of(eqn.invars[0]).shape
    return [shape[axis] for axis in eqn.params["dimension_numbers"].start_index_map] or [0]


def _added_length(numbers: Sequence[Hashable], of: Derivations) -> int | None:
    """Returns the length that a `select_n` adds to negative indices, or `None`."""
    match [of.operation(number) for number in numbers]:
        case [("lt", _, (index, zero), _), _, ("add", _, (moved, length), _)]:
            match of.operation(zero), of.operation(length):
                case ("literal", _, "0"), ("literal", _, added) if index == moved == numbers[1]:
                    return int(str(added))
    return None


def _keeps_entries(eqn: JaxprEqn) -> bool:
    """Returns whether the result has all entries once, in another shape or type."""
    if eqn.primitive.name == "broadcast_in_dim":
        return _size(eqn.outvars[0]) == _size(eqn.invars[0])
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (type_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
    whole = is_integer(eqn.invars[0]) and is_integer(eqn.outvars[0])
    # Indices of an axis fit into 32 bits, so a conversion from 64 bits merges none of them.
    return whole and after.itemsize >= min(4, before.itemsize)


def _is_wide(atom: Var | Literal) -> bool:
    """Returns whether the array holds integers that can count the entries of an array."""
    return is_integer(atom) and type_of(atom).dtype.itemsize >= 4


def _size(atom: Var | Literal) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))
