"""Marks in a program: where data enter a clipped sum and leave it, and what noise stages let out.

`dpoptax.information_flow` reads them; to a compiled program they are nothing.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dpoptax._tree import PyTree

EXAMPLES = "dpoptax.examples"
"""On a batch and its mask, on their way into a clipped sum: a row for each example."""

CLIPPED = "dpoptax.clipped"
"""On what one of these examples moves by a bounded amount."""

UNCLIPPED = "dpoptax.unclipped"
"""On what comes with it and is of the examples, such as their losses."""

VOUCHED = "dpoptax.vouched"
"""On what somebody says is clipped."""

NOISE = "dpoptax.noise"
"""On the key that all noise of a release is made of."""

RELEASE = "dpoptax.release"
"""On what has the guarantee of a noise stage."""

SELECTED = "dpoptax.selected"
"""On what is a part of a release that its noise stage counts later, by the key of that release."""

COUNTED = "dpoptax.counted"
"""On the rest of that release, with which the stage counts both."""

FOLDED = "dpoptax_folded_key"
"""The function that makes another key of a key and a number, where JAX has no primitive for it."""


def mark(tree: PyTree, name: str) -> PyTree:
    """The same arrays, marked, each with how many axes it has: `jax.vmap` gives it more."""
    return jax.tree.map(lambda x: checkpoint_name(x, f"{name}/{jnp.ndim(x)}"), tree)
