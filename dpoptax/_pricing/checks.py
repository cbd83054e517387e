"""Checks of arguments, with errors that name the argument, its value and a remedy."""

import math
import operator
import warnings
from typing import TYPE_CHECKING, Literal, get_args

from dpoptax import _pricing

if TYPE_CHECKING:
    import dp_accounting as dpa

Accountant = Literal["pld", "rdp"]

Unit = Literal["example", "user"]

ADD_OR_REMOVE = "add-or-remove-one"


def relation_named(name: str) -> "dpa.NeighboringRelation":
    """Returns the neighboring relation of dp_accounting with this name."""
    known = _pricing.events.RELATIONS
    if name not in known:
        raise ValueError(f"`neighboring_relation` must be one of {sorted(known)}, got {name!r}.")
    return known[name]


def check_accountant(accountant: str) -> None:
    """Raises if `accountant` is unknown."""
    known = get_args(Accountant)
    if accountant not in known:
        raise ValueError(f"`accountant` must be one of {list(known)}, got {accountant!r}.")


# Pairs of δ and N that were warned of. A plan is checked several times, on several lines.
_WARNED: set[tuple[float, int | None]] = set()


def check_delta(delta: float, dataset_size: int | None = None) -> None:
    """Raises if δ is not in (0, 1), and warns if it is not below 1/N."""
    if not 0 < number("delta", delta) < 1:
        raise ValueError(
            f"`delta` must be in (0, 1), got {delta}. Choose it well below one over the number of "
            "records or users."
        )
    known = delta, dataset_size
    if dataset_size is not None and delta >= 1 / dataset_size and known not in _WARNED:
        from dpoptax._support.callers import level_of_caller

        warnings.warn(
            f"delta={delta} is not below 1/N = {1 / dataset_size:.3g} for dataset_size="
            f"{dataset_size}: publishing one of the N records, picked at random, would meet it. "
            "Choose a smaller delta.",
            UserWarning,
            stacklevel=level_of_caller(),
        )
        _WARNED.add(known)


def number(name: str, value: float | None) -> float:
    """Returns `value` as a float, or raises an error that names it."""
    try:
        found = math.nan if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found) or isinstance(value, bool):
        raise ValueError(f"{_quoted(name)} must be a real number, got {_shown(value)}.")
    return found


def integer(name: str, value: int, minimum: int, remedy: str) -> int:
    """Returns `value` as an int of at least `minimum`, or raises an error."""
    try:
        found = operator.index(value)
    except TypeError:
        found = minimum - 1
    if found < minimum or isinstance(value, bool):
        raise ValueError(
            f"{_quoted(name)} must be an integer of at least {minimum}, got {_shown(value)}. "
            f"{remedy[:1].upper()}{remedy[1:]}."
        )
    return found


def seed_integer(seed: int) -> int:
    """Returns a seed as an int of at least 0, or raises an error that does not show it."""
    try:
        return integer("seed", seed, 0, "")
    except ValueError:
        raise ValueError(
            "`seed` must be a non-negative integer. Its value is a secret and is not shown. Take a "
            "fresh one from secrets.randbits(128)."
        ) from None


def is_hashable(value: object) -> bool:
    """Returns whether `value` and everything in it can be a key of a dict."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _quoted(name: str) -> str:
    return f"`{name}`" if name.isidentifier() else name


def _shown(value: object) -> str:
    """Formats `value` for an error; only type and shape of arrays, which may be data."""
    if shape := getattr(value, "shape", ()):
        return f"<{type(value).__name__} of shape {shape}>"
    return repr(value)
