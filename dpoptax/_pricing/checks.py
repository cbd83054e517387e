"""Checks of the arguments of accountants."""

import warnings
from typing import TYPE_CHECKING, Literal, get_args

from dpoptax import _pricing
from dpoptax._support.argument_checks import number

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
