"""Checks of the accounting's arguments: errors that name argument, value and remedy."""

import math
import operator
import warnings
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import dp_accounting as dpa

Accountant = Literal["pld", "rdp", "monte_carlo"]

ADD_OR_REMOVE = "add-or-remove-one"


def relation_named(name: str) -> "dpa.NeighboringRelation":
    """The relation of dp_accounting that `name` means; raises where it is unknown."""
    from dpoptax._pricing import events  # with dp_accounting, which a sampler can do without

    if name not in events.RELATIONS:
        raise ValueError(
            f"neighbouring_relation={name!r} is unknown; use one of {sorted(events.RELATIONS)}"
        )
    return events.RELATIONS[name]


def check_accountant(accountant: str) -> None:
    """Raises where `accountant` is unknown."""
    known = get_args(Accountant)
    if accountant not in known:
        raise ValueError(f"accountant={accountant!r} is unknown; use one of {list(known)}")


def check_delta(delta: float, dataset_size: int | None = None, *, stacklevel: int = 3) -> None:
    """Raises where δ is not in (0, 1); warns where it is not below 1/N."""
    if not 0 < number("delta", delta) < 1:
        raise ValueError(
            f"delta={delta} must be in (0, 1); choose it well below one over the number of records "
            "or users"
        )
    if dataset_size is not None and delta >= 1 / dataset_size:
        warnings.warn(
            f"delta={delta} is not below 1/N = {1 / dataset_size:.3g} for dataset_size="
            f"{dataset_size}: publishing one of these N outright, picked at random, would meet it; "
            "choose a smaller delta",
            UserWarning,
            stacklevel=stacklevel,
        )


def checked_multiplier(noise_multiplier: float) -> float:
    """The noise multiplier as a float; raises where it is no number of at least 0."""
    if not number("noise_multiplier", noise_multiplier) >= 0:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be at least 0; it is the noise's standard "
            "deviation over the clip bound"
        )
    return float(noise_multiplier)


def number(name: str, value: float | None) -> float:
    """`value` as a float, or an error that names it."""
    try:
        found = math.nan if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found) or isinstance(value, bool):
        raise ValueError(f"{name}={_shown(value)} is not a number; pass a real number")
    return found


def integer(name: str, value: int, minimum: int, remedy: str) -> int:
    """`value` as an int of at least `minimum`, or an error that names it and the remedy."""
    try:
        found = operator.index(value)
    except TypeError:
        found = minimum - 1
    if found < minimum or isinstance(value, bool):
        raise ValueError(
            f"{name}={_shown(value)} must be an integer of at least {minimum}; {remedy}"
        )
    return found


def is_hashable(value: object) -> bool:
    """Whether `value`, with all that is in it, can be a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _shown(value: object) -> str:
    """`value` for an error; of an array, which may be the data, its type alone."""
    if shape := getattr(value, "shape", ()):
        return f"<{type(value).__name__} of shape {shape}>"
    return repr(value)
