"""Reads the arguments of a loss or a gradient that `fit` gets."""

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
    required = [
        parameter
        for name, parameter in inspect.signature(loss_fn).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name != "frozen"
    ]
    return len(required) > 2


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
