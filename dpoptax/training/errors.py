"""Errors that a user can fix; the command line prints them without a traceback."""

import difflib
import traceback
from collections.abc import Iterable

_SHORT = 10
"""Up to so many names are listed even if one of them is likely meant."""
_LONG = 64
"""More names than this are never listed in full."""


class ConfigError(ValueError):
    """Raised for a value of a config or of the command line; the message names a remedy."""


def unknown_name(field: str, value: object, available: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name, with the nearest known one or a list of all."""
    names = sorted(available)
    near = difflib.get_close_matches(str(value), names, n=1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    if near and len(names) > _SHORT:
        listed = ""
    elif len(names) <= _LONG:
        listed = f"; available: {', '.join(names)}"
    else:
        listed = f"; {len(names)} are available, such as {', '.join(names[:3])}"
    return ConfigError(f"{field}={value!r} is unknown{listed}{meant}")


def line_in(path: str, error: BaseException) -> str:
    """Returns the last line of a file that an error went through, as ", line N", or ""."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f", line {lines[-1]}" if lines else ""
