"""Shows progress bars on terminals and progress lines elsewhere."""

import io
import time
from typing import Any

from tqdm import tqdm

PAUSE = 10.0
"""Seconds between two lines if the output is not a terminal."""

SHORT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
"""Format of a bar that leaves most of 80 columns to its postfix."""

HIDDEN = "{desc}: a secret number of {unit}s [{elapsed}]"
"""Format of a bar, and of lines, that do not show how much is done."""

_LINE = "{desc}: {n_fmt}/{total_fmt} {unit}s [{elapsed}<{remaining}]{postfix}\n"


class Bar(tqdm):
    """Shows a progress bar on a terminal, and lines elsewhere.

    There is a line every ten seconds and at the end. A nested bar, such as the steps of one of many
    runs, has no final line.
    """

    fp: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of tqdm."""
        self._shown = time.monotonic()
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Shows the bar, or a line if the last line is old, but nothing before the delay."""
        if self.delay and time.time() < self.start_t + self.delay:
            return True
        if self.fp.isatty():
            return super().display(msg, pos)
        if time.monotonic() - self._shown >= PAUSE:
            self._write_line()
        return True

    def clear(self, *args: Any, **kwargs: Any) -> None:
        """Clears the bar, so that other text can be written. Lines remain."""
        if self.fp.isatty():
            super().clear(*args, **kwargs)

    def close(self) -> None:
        """Closes the bar after a final update."""
        if not self.disable and not self.fp.isatty():
            if not self.pos and self.last_print_t >= self.start_t + self.delay:
                self._write_line()
            self.fp = io.StringIO()  # suppresses tqdm's final carriage return
        super().close()

    def _write_line(self) -> None:
        name = self.desc.removesuffix(": ") or "dpoptax"  # set_description adds the colon
        form = HIDDEN + "\n" if self.bar_format == HIDDEN else _LINE
        as_line = {**self.format_dict, "bar_format": form, "ncols": None, "prefix": name}
        self.fp.write(self.format_meter(**as_line))
        self.fp.flush()
        self._shown = time.monotonic()
