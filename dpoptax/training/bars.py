"""Progress bars, which are lines where nobody watches a terminal."""

import io
import time
from typing import Any

from tqdm import tqdm

PAUSE = 10.0
"""Seconds between two lines of a bar in a file."""

SHORT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
"""A bar's format that leaves most of 80 columns to the text beside it."""

_LINE = "{desc}: {n_fmt}/{total_fmt} {unit}s [{elapsed}<{remaining}]{postfix}\n"


class Bar(tqdm):
    """A progress bar on a terminal; in a file a line every ten seconds, and one at the end.

    A bar below another one, such as that of the steps of one run of many, has no line at its end.
    """

    fp: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As tqdm's."""
        self._shown = time.monotonic()
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Shows the bar, or a line if the last one was long ago, and neither before the delay."""
        if self.delay and time.time() < self.start_t + self.delay:
            return True
        if self.fp.isatty():
            return super().display(msg, pos)
        if time.monotonic() - self._shown >= PAUSE:
            self._write_line()
        return True

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Takes the bar away, so that something else can be written; lines stay."""
        if self.fp.isatty():
            super().clear(*args, **kwargs)

    def close(self) -> None:
        """Shows the bar for the last time."""
        if not self.disable and not self.fp.isatty():
            if not self.pos and self.last_print_t >= self.start_t + self.delay:
                self._write_line()
            self.fp = io.StringIO()  # no carriage return after it
        super().close()

    def _write_line(self) -> None:
        name = self.desc.removesuffix(": ") or "dpoptax"  # set_description ends it so
        as_line = {**self.format_dict, "bar_format": _LINE, "ncols": None, "prefix": name}
        self.fp.write(self.format_meter(**as_line))
        self.fp.flush()
        self._shown = time.monotonic()
