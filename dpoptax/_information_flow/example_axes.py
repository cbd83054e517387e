"""Describes the places of examples in an array, also in loops and on devices."""

import dataclasses
from collections.abc import Hashable, Sequence

from jax.sharding import PartitionSpec

from dpoptax._rounding.device_sums import names_of


@dataclasses.dataclass(frozen=True)
class AxisDigit:
    """Represents an axis on which entry n belongs to example n // run."""

    axis: int
    run: int = 1

    def move(self, axis: int) -> "AxisDigit":
        """Returns the digit on another axis."""
        return AxisDigit(axis, self.run)


@dataclasses.dataclass(frozen=True)
class LoopTurn:
    """Represents a turn of a loop, or a device, whose examples an array belongs to.

    Attributes:
      loop: the loop.
      mesh_axes: for devices, the axes of the mesh.
    """

    loop: Hashable
    mesh_axes: tuple[Hashable, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExampleAxes:
    """Says which example each entry of an array depends on, by the entry's position.

    Attributes:
      digits: the axes and turns that give the example's number, the leading digit first.
      drawn: the selections of these examples; () for those of the arguments. Arrays with equal
        `drawn` have the same examples in the same order.
    """

    digits: tuple[AxisDigit | LoopTurn, ...]
    drawn: tuple[Hashable, ...] = ()

    @property
    def axes(self) -> tuple[AxisDigit, ...]:
        """The axes among the digits."""
        return tuple(digit for digit in self.digits if isinstance(digit, AxisDigit))

    @property
    def is_leading(self) -> bool:
        """True if each row along the leading axis belongs to one example."""
        return self.axes == (AxisDigit(0),)

    def permuted(self, along: Sequence[AxisDigit]) -> "ExampleAxes":
        """Returns the same examples with each axis at another place."""
        new = iter(along)
        digits = tuple(next(new) if isinstance(d, AxisDigit) else d for d in self.digits)
        return dataclasses.replace(self, digits=digits)

    def placed(self, along: Sequence[AxisDigit]) -> "ExampleAxes | None":
        """Returns the same examples along other axes, or `None` if turns separate the old."""
        first = self.digits.index(self.axes[0])
        if self.digits[first : first + len(self.axes)] != self.axes:
            return None
        behind = self.digits[first + len(self.axes) :]
        return dataclasses.replace(self, digits=(*self.digits[:first], *along, *behind))


LEADING_AXIS = ExampleAxes((AxisDigit(0),))
"""The axes of an argument: one row for each example."""


def slice_scan(rows: ExampleAxes, turn: LoopTurn) -> ExampleAxes | None:
    """Returns the axes of the slice along the leading axis that a scan turn gets."""
    # Several turns would get the entries of one example.
    if any(digit.axis == 0 and digit.run > 1 for digit in rows.axes):
        return None
    digits = (
        digit if isinstance(digit, LoopTurn) else digit.move(digit.axis - 1) if digit.axis else turn
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def stack_turns(rows: ExampleAxes, turn: LoopTurn) -> ExampleAxes:
    """Returns the axes of the results of all turns, stacked along a new leading axis."""
    digits = (
        digit.move(digit.axis + 1)
        if isinstance(digit, AxisDigit)
        else AxisDigit(0)
        if digit == turn
        else digit
        for digit in rows.digits
    )
    return dataclasses.replace(rows, digits=tuple(digits))


def split_devices(rows: ExampleAxes, turn: LoopTurn, *, spec: PartitionSpec) -> ExampleAxes | None:
    """Returns the axes of one device's part, for an array with this `jax.P`."""
    digits: list[AxisDigit | LoopTurn] = []
    for digit in rows.digits:
        if isinstance(digit, AxisDigit) and (over := _sharing_axes(spec, digit)):
            # The entries of one example could be on two devices.
            if digit.run > 1:
                return None
            digits.append(dataclasses.replace(turn, mesh_axes=over))
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def join_devices(rows: ExampleAxes, turn: LoopTurn, *, spec: PartitionSpec) -> ExampleAxes | None:
    """Returns the axes of the whole array from those of the devices' parts.

    It inverts `split_devices`.
    """
    digits: list[AxisDigit | LoopTurn] = []
    for digit in rows.digits:
        over = _sharing_axes(spec, digit) if isinstance(digit, AxisDigit) else ()
        if over and (not digits or digits.pop() != dataclasses.replace(turn, mesh_axes=over)):
            return None
        digits.append(digit)
    return dataclasses.replace(rows, digits=tuple(digits))


def _sharing_axes(spec: PartitionSpec, digit: AxisDigit) -> tuple[Hashable, ...]:
    """Returns the mesh axes that an axis of an array is split over."""
    return names_of(spec[digit.axis]) if digit.axis < len(spec) else ()
