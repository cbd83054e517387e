"""Runs the README's Python code as one program and checks its result.

usage: first_program.py README
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def main(readme: Path) -> None:
    """Runs the program; raises if a line fails or the result is not as expected."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    if not blocks:
        raise SystemExit(f"{readme} has no Python code")
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), str(readme), "exec"), names)
    epsilon = float(printed.getvalue().removeprefix("(").split(",")[0])
    # The examples lie around 0.5 in each coordinate, so the parameters converge to 0.5.
    error = float(jnp.abs(names["params"] - 0.5).max())
    if not (0 < epsilon <= 3 and error < 0.3):
        raise SystemExit(f"the program printed epsilon {epsilon} and an error of {error}")
    print(f"the README's program runs: epsilon {epsilon:.3g}, on jax {jax.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
