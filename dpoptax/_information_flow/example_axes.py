"""Where a batch's examples are in an array, also in a turn of a loop and on a device."""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class AxisDigit:
    """An axis on which entry n is of example n // run."""

    axis: int
    run: int = 1


@dataclasses.dataclass(frozen=True)
class LoopTurn:
    """A turn of a loop, or a device: all of the array is of the examples that are its own.

    Attributes:
      of: the loop.
      over: the axes of the mesh, of devices.
    """

    loop: Hashable
    mesh_axes: tuple[Hashable, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExampleAxes:
    """An array made, in each entry, of the example alone that the entry's place names.

    Attributes:
      digits: where the example's number is read, its leading digit first.
      drawn: which examples these are: () for those of the arguments, else what they were chosen
        from these by. Arrays of equal `drawn` have the same ones, in the same order.
    """

    digits: tuple[AxisDigit | LoopTurn, ...]
    drawn: tuple[Hashable, ...] = ()

    @property
    def axes(self) -> tuple[AxisDigit, ...]:
        """The axes among the digits."""
        return tuple(digit for digit in self.digits if isinstance(digit, AxisDigit))

    @property
    def is_leading(self) -> bool:
        """Whether each row, by the leading axis, is of one example."""
        return self.axes == (AxisDigit(0),)

    def permuted(self, along: Sequence[AxisDigit]) -> "ExampleAxes":
        """With each of its axes at another place."""
        new = iter(along)
        digits = tuple(next(new) if isinstance(d, AxisDigit) else d for d in self.digits)
        return dataclasses.replace(self, digits=digits)

    def placed(self, along: Sequence[AxisDigit]) -> "ExampleAxes | None":
        """With its examples along other axes; None where turns are between those before."""
        first = self.digits.index(self.axes[0])
        if self.digits[first : first + len(self.axes)] != self.axes:
            return None
        behind = self.digits[first + len(self.axes) :]
        return dataclasses.replace(self, digits=(*self.digits[:first], *along, *behind))


LEADING_AXIS = ExampleAxes((AxisDigit(0),))
"""Of an argument: a row for each example."""


def slice_scan(rows: ExampleAxes, turn: LoopTurn) -> ExampleAxes | None:
    """Of one of the slices along the leading axis that a loop gets, each in its turn."""
    if any(digit.axis == 0 and digit.run > 1 for digit in rows.axes):
        return None
    digits = (
        digit
        if isinstance(digit, LoopTurn)
        else dataclasses.replace(digit, axis=digit.axis - 1)
        if digit.axis
        else turn
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def stack_turns(rows: ExampleAxes, turn: LoopTurn) -> ExampleAxes:
    """Of the results of all turns of a loop, along a new leading axis."""
    digits = (
        dataclasses.replace(digit, axis=digit.axis + 1)
        if isinstance(digit, AxisDigit)
        else AxisDigit(0)
        if digit == turn
        else digit
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def split_devices(
    rows: ExampleAxes, turn: LoopTurn, *, spec: Sequence[Hashable]
) -> ExampleAxes | None:
    """Of the part of one device of those that share the axes of a `jax.P`."""
    digits: list[AxisDigit | LoopTurn] = []
    for digit in rows.digits:
        if isinstance(digit, AxisDigit) and (over := _sharing_axes(spec, digit)):
            if digit.run > 1:
                return None
            digits.append(dataclasses.replace(turn, mesh_axes=over))
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def join_devices(
    rows: ExampleAxes, turn: LoopTurn, *, spec: Sequence[Hashable]
) -> ExampleAxes | None:
    """Of the whole of which each device has a part, as `split` the other way round."""
    digits: list[AxisDigit | LoopTurn] = []
    for digit in rows.digits:
        over = _sharing_axes(spec, digit) if isinstance(digit, AxisDigit) else ()
        if over and (not digits or digits.pop() != dataclasses.replace(turn, mesh_axes=over)):
            return None
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def _sharing_axes(spec: Sequence[Hashable], digit: AxisDigit) -> tuple[Hashable, ...]:
    """The axes of a mesh that an axis of an array is split over."""
    return mesh_axes(spec[digit.axis]) if digit.axis < len(spec) else ()


def mesh_axes(axes: Hashable) -> tuple[Hashable, ...]:
    """The axes of a mesh that are named, one of them, several or none."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)
