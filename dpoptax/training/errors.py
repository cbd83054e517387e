"""Errors that a user can fix; the command line prints them without a traceback."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class ConfigError(ValueError):
    """Raised for an invalid config or command line. The message names the remedy."""


@contextlib.contextmanager
def explains_missing(user: str, install: str) -> Iterator[None]:
    """Names the packages to install if imports in the context do not find one.

    Args:
        user: The name that needs them, such as "dpoptax.training.fit".
        install: Arguments of `pip install`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "dpoptax").partition(".")[0] == "dpoptax":
            raise
        raise ModuleNotFoundError(
            f"`{user}` needs {error.name}, which is not installed. Run `pip install {install}`.",
            name=error.name,
        ) from error


def unknown_name(field: str, value: object, available: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name, with the nearest or all known names.

    Args:
        field: A field, or a text such as "A field of Disk" to begin the message with.
        value: The unknown name.
        available: The known names.
    """
    names = sorted(available)
    near = difflib.get_close_matches(str(value), names, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    allowed = f"one of {', '.join(names)}"
    if len(names) > 64:
        allowed = f"one of {len(names)} names such as {', '.join(names[:3])}"
    subject = f"`{field}`" if field.isidentifier() else field
    return ConfigError(f"{subject} must be {allowed}, got {value!r}.{meant}")
