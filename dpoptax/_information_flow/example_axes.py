"""Where a batch's examples are in an array, also in a turn of a loop and on a device."""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class Along:
    """An axis on which entry n is of example n // run."""

    axis: int
    run: int = 1


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of a loop, or a device: all of the array is of the examples that are its own.

    Attributes:
      of: the loop.
      over: the axes of the mesh, of devices.
    """

    of: Hashable
    over: tuple[Hashable, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array made, in each entry, of the example alone that the entry's place names.

    Attributes:
      digits: where the example's number is read, its leading digit first.
      drawn: which examples these are: () for those of the arguments, else what they were chosen
        from these by. Arrays of equal `drawn` have the same ones, in the same order.
    """

    digits: tuple[Along | Turn, ...]
    drawn: tuple[Hashable, ...] = ()

    @property
    def along(self) -> tuple[Along, ...]:
        """The axes among the digits."""
        return tuple(digit for digit in self.digits if isinstance(digit, Along))

    @property
    def leading(self) -> bool:
        """Whether each row, by the leading axis, is of one example."""
        return self.along == (Along(0),)

    def moved(self, along: Sequence[Along]) -> "Rows":
        """With each of its axes at another place."""
        new = iter(along)
        digits = tuple(next(new) if isinstance(d, Along) else d for d in self.digits)
        return dataclasses.replace(self, digits=digits)

    def laid_out(self, along: Sequence[Along]) -> "Rows | None":
        """With its examples along other axes; None where turns are between those before."""
        first = self.digits.index(self.along[0])
        if self.digits[first : first + len(self.along)] != self.along:
            return None
        behind = self.digits[first + len(self.along) :]
        return dataclasses.replace(self, digits=(*self.digits[:first], *along, *behind))


LEADING = Rows((Along(0),))
"""Of an argument: a row for each example."""


def scanned(rows: Rows, turn: Turn) -> Rows | None:
    """Of one of the slices along the leading axis that a loop gets, each in its turn."""
    if any(digit.axis == 0 and digit.run > 1 for digit in rows.along):
        return None
    digits = (
        digit
        if isinstance(digit, Turn)
        else dataclasses.replace(digit, axis=digit.axis - 1)
        if digit.axis
        else turn
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def stacked(rows: Rows, turn: Turn) -> Rows:
    """Of the results of all turns of a loop, along a new leading axis."""
    digits = (
        dataclasses.replace(digit, axis=digit.axis + 1)
        if isinstance(digit, Along)
        else Along(0)
        if digit == turn
        else digit
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def split(rows: Rows, turn: Turn, *, spec: Sequence[Hashable]) -> Rows | None:
    """Of the part of one device of those that share the axes of a `jax.P`."""
    digits: list[Along | Turn] = []
    for digit in rows.digits:
        if isinstance(digit, Along) and (over := _sharing(spec, digit)):
            if digit.run > 1:
                return None
            digits.append(dataclasses.replace(turn, over=over))
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def united(rows: Rows, turn: Turn, *, spec: Sequence[Hashable]) -> Rows | None:
    """Of the whole of which each device has a part, as `split` the other way round."""
    digits: list[Along | Turn] = []
    for digit in rows.digits:
        over = _sharing(spec, digit) if isinstance(digit, Along) else ()
        if over and (not digits or digits.pop() != dataclasses.replace(turn, over=over)):
            return None
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def _sharing(spec: Sequence[Hashable], digit: Along) -> tuple[Hashable, ...]:
    """The axes of a mesh that an axis of an array is split over."""
    return names(spec[digit.axis]) if digit.axis < len(spec) else ()


def names(axes: Hashable) -> tuple[Hashable, ...]:
    """The axes of a mesh that are named, one of them, several or none."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)
