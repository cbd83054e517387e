"""Declares allowed values and roles of config fields."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from dpoptax.training.errors import ConfigError, unknown_name

Value = TypeVar("Value")


class Role(enum.Flag):
    """Freedoms of a field. A run cannot continue with another value of a field without a role."""

    CHANGEABLE = enum.auto()
    """May change when a run continues, because it affects its releases through the plan at most,
    which is compared: a drawn seed, calibrated noise."""
    UNPRICED = enum.auto()
    """Does not affect the privacy cost of a run."""


class Numbers(NamedTuple):
    """The allowed numbers of a field.

    Attributes:
        valid: Returns whether a number is allowed.
        remedy: Names the allowed values in messages, after "must be".
        hint: Ends messages with alternatives, if any.
    """

    valid: Callable[[float], bool]
    remedy: str
    hint: str = ""


def field(default: Value, role: Role | None = None, numbers: Numbers | None = None) -> Value:
    """Declares a field of a dataclass with default, role and allowed numbers."""
    metadata = {"role": role or Role(0), "numbers": numbers}
    declared: Any = dataclasses.field(default=default, metadata=metadata)
    return declared


def check(settings: Any) -> None:
    """Checks the fields of a dataclass: allowed numbers and `Literal` types.

    None is allowed if the type includes it.

    Raises:
        ConfigError: A value is not allowed.
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
    """Returns the role of a field; fields without a declared role have an empty one."""
    return declared.metadata.get("role", Role(0))


def fields_with(settings: Any, role: Role) -> tuple[str, ...]:
    """Returns the names of the fields with `role`, of a dataclass or an instance."""
    return tuple(each.name for each in dataclasses.fields(settings) if role in role_of(each))
