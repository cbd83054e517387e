"""Marks in a program: where examples enter a clipped sum, and what noise stages let out.

`dpoptax.information_flow` reads them; to a compiled program they are nothing.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from dpoptax._trees import PyTree

EXAMPLES = "dpoptax.examples"
"""On what a clip bounds the influence of, row by row."""

RELEASE = "dpoptax.release"
"""On what has the guarantee of a noise stage."""


def mark(tree: PyTree, name: str) -> PyTree:
    """The same arrays, marked."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
