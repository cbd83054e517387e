"""Numbers the values of a program by their computation, and compares noise keys."""

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

ProgramPath: TypeAlias = tuple[int, ...]
"""The place of an operation: its enclosing operations and branches, from the outside."""
_SelectedEntry: TypeAlias = tuple[str, dict[str, Any], Sequence[Hashable], int]

# These return all entries of one operand in another shape or type.
_REARRANGING_PRIMITIVES = {
    *("broadcast_in_dim", "random_unwrap", "random_wrap", "reshape", "rev", "squeeze", "transpose")
}
# These return some entries of one operand.
_SELECTION_PRIMITIVES = {"dynamic_slice", "gather", "slice", "unstack"}
_ROOT_KINDS = {("argument",), ("constant",), ("random_seed",)}


@dataclasses.dataclass(frozen=True)
class LoopCarry:
    """Describes one carried value of a loop, by numbers.

    Attributes:
      carried: the value that any turn gets.
      later: the value that a later turn gets.
      last: the value that the last turn leaves.
      first: the value that the first turn gets.
      result: the value that the turn computes from `carried`.
      turns: the number of turns; infinity if unknown.
      later_result: the value that a later turn computes from `later`; `None` if no such turn was
        followed.
    """

    carried: Hashable
    later: Hashable
    last: Hashable
    first: Hashable
    result: Hashable
    turns: float
    later_result: Hashable = None

    def predecessors(self, number: Hashable) -> tuple[Hashable, ...]:
        """Returns the values from which a number is derived, if each turn's result is.

        For whole numbers, "derived from" means "not below".
        """
        # By induction, the value that any turn gets is derived from that of the first turn. The
        # last value is the result of a turn, or the first value if the loop takes zero turns.
        before = {self.carried: (self.first,), self.later: (self.result,)}
        found = before.get(number, (self.first, self.result, self.later_result))
        return tuple(each for each in found if each is not None)


class Derivations:
    """Stores the operation behind each number, and decides whether two keys differ.

    Keys differ if this follows from these assumptions. Arguments are independent keys, and so is
    each entry of an argument. `fold_in` and `split` are hashes: no two pairs of key and number give
    one key, and no key is derived from itself. Counters do not overflow.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._operations: dict[Hashable, tuple[Any, ...]] = {}
        self._loops: dict[Hashable, LoopCarry] = {}
        self._disjoint: set[frozenset[Hashable]] = set()
        self._asked: list[LoopCarry] = []
        self._reached: tuple[ProgramPath, ...] = ()  # places to which branches are known to lead

    def number(self, *what: Hashable) -> int:
        """Returns a number, the same for equal arguments."""
        # Value numbering: equal operations on equal numbers give one number.
        number = self._numbers.setdefault(what, len(self._numbers))
        self._operations[number] = what
        return number

    def operation(self, number: Hashable) -> tuple[Any, ...]:
        """Returns an operation's name, parameters, operands by number, and result index."""
        return self._operations.get(number, ())

    def add_loop(self, loop: LoopCarry) -> None:
        """Records a value that is carried through the turns of a loop."""
        self._loops |= dict.fromkeys((loop.carried, loop.later, loop.last), loop)

    def add_later(self, later: Hashable, result: Hashable) -> None:
        """Records the result that a later turn computes from its carry."""
        if later in self._loops:
            self.add_loop(dataclasses.replace(self._loops[later], later_result=result))

    def add_disjoint(self, one: Hashable, other: Hashable) -> None:
        """Records two parts of an array of distinct entries, which share no entry."""
        self._disjoint.add(frozenset((one, other)))

    def differ(
        self, one: Hashable, other: Hashable, *, single: bool, reached: tuple[ProgramPath, ...] = ()
    ) -> bool:
        """Returns whether two keys differ, or all keys of one array from all of another.

        Args:
          one: the number of a key, or of an array of keys.
          other: likewise.
          single: whether both are single keys.
          reached: the places where they draw noise. The branches that lead there were taken, which
            decides choices between values.
        """
        # All functions below read `self._reached`: they follow keys, counters and choices into each
        # other, and each may come to a choice that the taken branches decide.
        with self._given(reached):
            return self._differ(one, other, single)

    @contextlib.contextmanager
    def _given(self, reached: tuple[ProgramPath, ...]) -> Iterator[None]:
        """Assumes that the branches to these places were taken."""
        before, self._reached = self._reached, reached
        yield
        self._reached = before

    def _differ(self, one: Hashable, other: Hashable, single: bool) -> bool:
        if one is None or other is None:
            return False
        # A reshaped array of keys has the same keys.
        one, other = self.source_array(one), self.source_array(other)
        if one == other:
            return False
        if frozenset((one, other)) in self._disjoint:
            return True
        ancestors, others = dict(self._ancestors(one)), dict(self._ancestors(other))
        root, other_root = (
            next((n for n in found if self.operation(n)[:1] in _ROOT_KINDS), None)
            for found in (ancestors, others)
        )
        # Keys of independent roots differ, whatever is derived from each.
        if None not in (root, other_root) and self._are_independent(root, other_root):
            return True
        # An entry of an array may be derived from another, unless its keys are independent.
        # The entry is true if a hash lies between the two, so that they surely differ.
        if (single or self._is_argument(root)) and (ancestors.get(other) or others.get(one)):
            return True
        (key, index, _), (other_key, other_index, _) = self._derived(one), self._derived(other)
        if key is None or other_key is None:
            return False
        # No two pairs of key and number give one key, so unequal numbers suffice for any keys. If
        # the numbers may be equal, the keys must differ.
        if self._unequal(index, other_index):
            # Arrays are compared entry by entry: all pairs differ only for independent keys.
            literal = self._sum(index)[0] is self._sum(other_index)[0] is None
            if single or literal or (key == other_key and self._is_argument(key)):
                return True
        # If the indices may be equal, only different parents help.
        return self._differ(key, other_key, single)

    def _is_argument(self, number: Hashable) -> bool:
        return self.operation(number)[:1] == ("argument",)

    def _are_independent(self, one: Hashable, other: Hashable) -> bool:
        """Returns whether two roots are independent.

        A constant or a seed may be equal to an argument.
        """
        (kind, *of), (other_kind, *other_root) = self.operation(one), self.operation(other)
        if one == other or kind != other_kind:
            return False
        if kind == "random_seed":
            return self._unequal(of[1][0], other_root[1][0])
        return kind == "argument" or all(isinstance(x, bytes) for x in (*of, *other_root))

    def source_array(self, number: Hashable) -> Hashable:
        """Returns the array that an array is a rearrangement of."""
        while True:
            match self.operation(number):
                case (str(name), _, (before,), _) if name in _REARRANGING_PRIMITIVES:
                    number = before
                case ("either", *_) if len(taken := self._possible_values(number)) == 1:
                    number = taken[0]
                case _:
                    return number

    def _possible_values(self, number: Hashable) -> list[Hashable]:
        """Returns the possible values of a choice, given the branches that were taken."""
        match self.operation(number):
            case ("either", choice, *branches):
                known = [
                    made
                    for branch, made in branches
                    if any(place[: len(choice) + 1] == (*choice, branch) for place in self._reached)
                ]
                return known or [made for _, made in branches]
        return []

    def _derived(self, number: Hashable) -> tuple[Hashable, Hashable, bool]:
        """Returns the parent of a key, the index used, and whether the two surely differ."""
        match self.operation(number):
            case ("random_fold_in", _, (key, index), _):
                return self.source_array(key), index, True
            case ("random_split", _, (key,), _):
                return self.source_array(key), None, True
            # A slice that `LoopLabels.enter` gave to a turn of a loop.
            case (_, "part" | "other part", _, array):
                return self._entry(array, None)
            case (str(name), parameters, (array, *indices), place) if name in _SELECTION_PRIMITIVES:
                return self._entry(array, (name, dict(parameters), indices, place))
        return None, None, False

    def _entry(
        self, array: Hashable, chosen: _SelectedEntry | None
    ) -> tuple[Hashable, Hashable, bool]:
        match self.operation(array):
            case ("random_split", parameters, (key,), _):
                of = dict(parameters)
                # The result of a split has the axes of its key first, then the shape of the split.
                # Without a known entry, the index is unknown, which is never unequal to another.
                index = chosen and self._index(of["shape"], of["axes"], *chosen)
                return self.source_array(key), index, True
            case ("argument", *_, (length,)):
                return array, chosen and self._index((length,), 0, *chosen), False
        return self.source_array(array), None, False

    def _index(
        self,
        shape: tuple[int, ...],
        axes: int,
        name: str,
        parameters: dict[str, Any],
        indices: Sequence[Hashable],
        place: int,
    ) -> Hashable:
        """Returns the number of the selected entry of `shape`, after `axes` leading axes."""
        if name == "slice":
            starts, limits = (parameters[f"{of}_indices"][axes:] for of in ("start", "limit"))
            alone = all(limit == start + 1 for start, limit in zip(starts, limits, strict=True))
            # The number of the entry in row-major order. Equal entries get equal numbers, and
            # others do not.
            return self._literal(int(np.ravel_multi_index(starts, shape))) if alone else None
        # Below, only single axes are handled. All else counts as an unknown entry.
        if len(shape) > 1:
            return None
        if name == "unstack" and parameters["axis"] == axes:
            return self._literal(place)
        if name == "dynamic_slice" and parameters["slice_sizes"] == (1,):
            # JAX clamps indices, so two that are outside would select one entry.
            low, high = self._range(indices[0])
            return indices[0] if low >= 0 and high < shape[0] else None
        return None

    def _literal(self, value: int) -> int:
        return self.number("literal", "integer", str(value))

    def _ancestors(self, number: Hashable) -> Iterator[tuple[Hashable, bool]]:
        """Yields a key and its ancestors, each with whether it surely differs."""
        waiting, seen = [(number, False)], set()
        while waiting:
            now, another = waiting.pop(0)
            now = self.source_array(now)
            if now in seen:
                continue
            seen.add(now)
            yield now, another
            key, _, strict = self._derived(now)
            if key is not None:
                waiting.append((key, another or strict))
            waiting += [(before, another) for before in self._predecessors(now)]

    def _predecessors(self, number: Hashable) -> tuple[Hashable, ...]:
        loop = self._loops.get(number)
        return loop.predecessors(number) if loop and self._is_monotone(loop) else ()

    def _is_monotone(self, loop: LoopCarry) -> bool:
        """Returns whether each turn's result derives from its carry or is not below it."""
        if loop in self._asked:  # asked by a loop within it; without this, both would ask forever
            return False
        self._asked.append(loop)
        # This must hold in all turns, and places are reached in single ones.
        with self._given(()):
            derived = any(number == loop.carried for number, _ in self._ancestors(loop.result))
            above = any(base == loop.carried and n >= 0 for base, n in self._minima(loop.result))
        self._asked.pop()
        return derived or above

    def _unequal(self, one: Hashable, other: Hashable) -> bool:
        """Returns whether two whole numbers surely differ."""
        if one is None or other is None:
            return False
        (base, added), (other_base, other_added) = self._sum(one), self._sum(other)
        if base == other_base:
            # Integers of 32 bits wrap around, so the difference modulo 2³² counts.
            return (added - other_added) % 2**32 != 0
        # Disjoint parts of distinct counters stay disjoint if one literal is added to both.
        if added == other_added and frozenset((base, other_base)) in self._disjoint:
            return True
        (low, high), (lowest, highest) = self._range(one), self._range(other)
        if high < lowest or highest < low:
            return True
        # One number is larger if a lower bound of it is the other number plus something positive.
        above = any(below == base and n > added for below, n in self._minima(other))
        return above or any(
            below == other_base and n > other_added for below, n in self._minima(one)
        )

    def _minima(self, number: Hashable) -> Iterator[tuple[Hashable, int]]:
        """Yields lower bounds of a whole number, as sums of a number and a literal."""
        waiting, seen = [self._sum(number)], set()
        while waiting:
            base, added = waiting.pop(0)
            if base in seen:
                continue
            seen.add(base)
            yield base, added
            # Any branch may have been taken, so a lower bound must hold in all of them.
            branches = [dict(self._minima(made)) for made in self._possible_values(base)]
            for below in set.intersection(*map(set, branches)) if branches else ():
                yield below, added + min(found[below] for found in branches)
            for before in self._predecessors(base):
                below, more = self._sum(before)
                waiting.append((below, added + more))

    def _range(self, number: Hashable) -> tuple[float, float]:
        """Returns a lower and an upper bound of a whole number."""
        base, added = self._sum(number)
        if base is None:
            return added, added
        # A lower bound "None plus n" is the literal n.
        low = max((n for below, n in self._minima(number) if below is None), default=-math.inf)
        loop = self._loops.get(base)
        # `last` is the value after the final turn, one step more than any turn gets.
        if loop is None or base == loop.last or None in (loop.first, loop.result):
            return low, math.inf
        (start, first), (before, step) = self._sum(loop.first), self._sum(loop.result)
        # A counter from a literal, which every turn increases by a literal.
        known = start is None and before == loop.carried and step >= 0
        return low, first + step * (loop.turns - 1) + added if known else math.inf

    def _sum(self, number: Hashable) -> tuple[Hashable, int]:
        """Returns a whole number as a number, or `None` for zero, plus a literal."""
        match self.operation(number):
            case ("literal", "integer", str(value)):
                return None, int(value)
            case ("either", *_) if len(taken := self._possible_values(number)) == 1:
                return self._sum(taken[0])
            case ("broadcast_in_dim" | "squeeze", _, (before,), _):  # the order of entries is kept
                return self._sum(before)
            case ("convert_element_type", parameters, (before,), _):
                dtype = jnp.dtype(dict(parameters)["new_dtype"])
                if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4:
                    return self._sum(before)
            case ("add" | "sub" as name, _, (one, other), _):
                (base, added), (other_base, other_added) = self._sum(one), self._sum(other)
                if other_base is None:
                    return base, added + (other_added if name == "add" else -other_added)
                if base is None and name == "add":
                    return other_base, added + other_added
            # `one` is the value where `chosen` is false, and `other` where it is true.
            case ("select_n", _, (chosen, one, other), _):
                return self._selected(number, chosen, one, other)
        return number, 0

    def _selected(
        self, number: Hashable, chosen: Hashable, one: Hashable, other: Hashable
    ) -> tuple[Hashable, int]:
        """Returns the sum behind an index counted from the end, or a count that saturates."""
        match self.operation(chosen):
            case ("lt", _, (index, limit), _):
                before, most = self._sum(index), self._sum(limit)
                # As JAX indexes: index + length if index < 0 else index.
                if most == (None, 0) and self._sum(one) == before and self._range(index)[0] >= 0:
                    return before
                # As `optax.safe_increment` counts: count + 1 if count < the largest integer.
                if most[0] is None and most[1] >= 2**31 - 1 and self._sum(one) == most:
                    base, added = self._sum(other)
                    if (base, added - 1) == before:
                        return base, added
        return number, 0
