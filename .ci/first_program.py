"""Runs the README's Python as one program, on a loss and data of its own, and checks what it says.

usage: first_program.py README
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def loss_fn(params, example):
    """Squared error of a linear model on one example."""
    x, y = example
    return (x @ params["w"] - y) ** 2


class Pairs(tuple):
    """A tuple of arrays that is indexed like one array of examples."""

    def __getitem__(self, indices):
        return tuple(part[indices] for part in tuple(self))


def main(readme: Path) -> None:
    """Run it; raises where a line of it fails, or where the last one prints no epsilon."""
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    if not blocks:
        raise SystemExit(f"{readme} has no Python to run")
    program = "\n".join(blocks)
    # What the program leaves to its reader. The optimizer's state comes after the optimizer.
    inputs = np.random.default_rng(0).normal(size=(60_000, 4)).astype(np.float32)
    names = {
        "loss_fn": loss_fn,
        "data": Pairs((inputs, inputs.sum(axis=1))),
        "params": {"w": jnp.zeros(4)},
        "steps": 2,
    }
    program = program.replace("for t in", "opt_state = tx.init(params)\nfor t in", 1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(readme), "exec"), names)
    epsilon = float(printed.getvalue().split()[-1])
    moved = float(jnp.abs(names["params"]["w"]).max())
    if not (0 < epsilon < 10 and 0 < moved < 1):
        raise SystemExit(f"the program ended with epsilon {epsilon} and a move of {moved}")
    print(f"the README's program runs: epsilon {epsilon:.3g}, on jax {jax.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
