"""The errors that a user can mend; the command line prints them without a traceback."""

import difflib
import traceback
from collections.abc import Iterable

# So many names are listed, and so many of more.
_MANY, _NEAR = 64, 3


class ConfigError(ValueError):
    """A value of a config or of the command line is not allowed; the message says what is."""


def unknown_name(field: str, value: object, available: Iterable[str]) -> ConfigError:
    """The error for a name that no registry holds: it lists those that it does hold, if few."""
    names = sorted(available)
    near = difflib.get_close_matches(str(value), names, n=_NEAR)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    if len(names) <= _MANY:
        return ConfigError(f"{field}={value!r} is unknown; available: {', '.join(names)}{meant}")
    some = ", ".join(near or names[:_NEAR])
    return ConfigError(
        f"{field}={value!r} is unknown; {len(names)} are available, such as {some}{meant}"
    )


def line_in(path: str, error: BaseException) -> str:
    """The last line of a file that an error went through, as ", line N"; empty if there is none."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f", line {lines[-1]}" if lines else ""
