"""Declares the allowed values of each field of a config, and the parts of a run that read it."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from dpoptax.training.errors import ConfigError, unknown_name

Value = TypeVar("Value")


class Role(enum.Flag):
    """Effects of a field. Each field of a config has one of the first three."""

    KEPT = enum.auto()
    """Another value is another run: one that was begun does not go on with it."""
    PLANNED = enum.auto()
    """Kept too, as the plan resolved it: a seed that was drawn, noise that was calibrated."""
    CHANGEABLE = enum.auto()
    """May change between two parts of a run: it changes nothing of what a step releases."""
    STEP = enum.auto()
    """The compiled step depends on it: runs that differ in other fields alone share a program."""
    UNPRICED = enum.auto()
    """It changes nothing of what a run costs in privacy."""


class Numbers(NamedTuple):
    """The numbers that a field takes.

    Attributes:
        valid: Whether one is among them.
        remedy: Names the allowed values in messages, after "must be".
        hint: Ends messages with alternatives, if any.
    """

    valid: Callable[[float], bool]
    remedy: str
    hint: str = ""


def field(default: Value, role: Role, numbers: Numbers | None = None) -> Value:
    """Declares a field of a dataclass with its default, its role and its allowed numbers."""
    metadata = {"role": role, "numbers": numbers}
    declared: Any = dataclasses.field(default=default, metadata=metadata)
    return declared


def check(settings: Any) -> None:
    """Raises a `ConfigError` for a number that its field does not allow, and for an unknown name.

    A name is unknown if the field's type is a `Literal` without it. None is allowed if the type has
    it.
    """
    for each in dataclasses.fields(settings):
        value, kinds = getattr(settings, each.name), get_args(each.type)
        if get_origin(each.type) is Literal and value not in kinds:
            raise unknown_name(each.name, value, kinds)
        numbers = each.metadata.get("numbers")
        if numbers is None or (value is None and type(None) in kinds):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and numbers.valid(value)):
            raise ConfigError(
                f"`{each.name}` must be {numbers.remedy}, got {value!r}.{numbers.hint}"
            )


def role_of(declared: "dataclasses.Field[Any]") -> Role:
    """Returns the role of a field, empty if it declares none."""
    return declared.metadata.get("role", Role(0))


def fields_with(settings: Any, role: Role) -> tuple[str, ...]:
    """Returns the names of the fields of a dataclass, or of an instance, with `role`."""
    return tuple(each.name for each in dataclasses.fields(settings) if role in role_of(each))


class Part:
    """The fields of an instance that have a role. Reading another field is an error.

    Two parts are equal, with equal hashes, if these fields are.
    """

    def __init__(self, settings: Any, role: Role) -> None:
        self._role = role
        self._values = {name: getattr(settings, name) for name in fields_with(settings, role)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as copying asks, before there are values
            raise AttributeError(name)
        if name not in self._values:
            raise AttributeError(
                f"`{name}` must have role {self._role} to be read here. Add this role to the "
                "declaration of the field."
            )
        return self._values[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))
