"""Reads the arguments of the functions that `fit` gets."""

import inspect
from collections.abc import Callable
from typing import Any


def takes_key(loss_fn: Callable[..., Any] | None) -> bool:
    """Returns whether a loss requires a third positional argument.

    Raises:
        TypeError: `loss_fn` is not a function.
    """
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be the loss of one example, got {loss_fn!r}.")
    return _required(loss_fn) > 2


def takes_state(evaluate: Callable[..., Any]) -> bool:
    """Returns whether `evaluate` requires the state of the optimizer next to the parameters.

    Raises:
        TypeError: `evaluate` is not a function.
    """
    if not callable(evaluate):
        raise TypeError(f"`evaluate` must be a function of the parameters, got {evaluate!r}.")
    return _required(evaluate) > 1


def requires_key(grad_fn: Callable[..., Any]) -> bool:
    """Returns whether a given gradient requires the keyword `key`.

    Raises:
        TypeError: `grad_fn` is not a function.
    """
    if not callable(grad_fn):
        raise TypeError(
            f"`grad_fn` must be a function from `dpoptax.clipped_grad`, got {grad_fn!r}."
        )
    key = inspect.signature(grad_fn).parameters.get("key")
    return key is not None and key.default is key.empty


def _required(function: Callable[..., Any]) -> int:
    """Returns the number of required positional arguments, except `frozen`."""
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name != "frozen"
        for name, parameter in inspect.signature(function).parameters.items()
    )
