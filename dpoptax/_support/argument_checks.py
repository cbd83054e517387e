"""Checks of arguments, with errors that name the argument, its value and a remedy."""

import math
import numbers
import operator

import jax


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


def check_known(**values: object) -> None:
    """Raises an error if a value is not a Python number.

    `optax.inject_hyperparams` makes arrays, which are not Python numbers.
    """
    for name, value in values.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"`{name}` must be a Python number, known before `jit`, got {value!r}. "
                "`optax.inject_hyperparams` turns all numbers into arrays except those in "
                "`static_args`. List all except the learning rate there, or wrap a function of "
                "only the learning rate that returns the chain."
            )
        if not isinstance(value, numbers.Real):
            raise TypeError(f"`{name}` must be a Python number, got {value!r}.")


def check_decays(**decays: float) -> None:
    """Raises an error if a decay is not a Python number in [0, 1)."""
    check_known(**decays)
    for name, value in decays.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"`{name}` must be in [0, 1), got {value}.")


def check_stddev(stddev: float, *, zero: bool = True) -> None:
    """Raises an error if `stddev` is not a finite, non-negative Python number.

    With `zero=False` it must be positive.
    """
    check_known(stddev=stddev)
    if not (math.isfinite(stddev) and (stddev > 0.0 or (zero and stddev == 0.0))):
        raise ValueError(
            f"`stddev` must be finite and {'non-negative' if zero else 'positive'}, got {stddev}. "
            "Pass the standard deviation of the noise in each coordinate, for example from "
            "`dpoptax.extend.noise_stddev`."
        )
