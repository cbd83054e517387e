"""Marks arrays in a program for `dpoptax.information_flow`.

The marks show where examples enter and leave a clipped sum, and the outputs of noise stages. They
have no effect on a compiled program.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dpoptax._support.tree import PyTree

EXAMPLES = "dpoptax.examples"
"""Marks a batch and its mask at the input of a clipped sum, one row per example."""

CLIPPED = "dpoptax.clipped"
"""Marks values that each of these examples changes by a bounded amount."""

UNCLIPPED = "dpoptax.unclipped"
"""Marks other values of the examples, such as their losses."""

VOUCHED = "dpoptax.vouched"
"""Marks values that the caller of `trust_clipped` declares to be clipped."""

NOISE = "dpoptax.noise"
"""Marks the key from which all noise of a release is drawn."""

RELEASE = "dpoptax.release"
"""Marks values that have the guarantee of a noise stage."""

SEALED = "dpoptax_sealed_arrays"
"""The name of the functions that seal and unseal arrays, from operands to results in order."""

FOLDED = "dpoptax_folded_key"
"""The name of the function that folds a number into a noise key."""

ANY_ORDER = "dpoptax_any_order"
"""The name of the scope of scatters whose rounding is bounded for any order of additions."""


def mark(tree: PyTree, name: str) -> PyTree:
    """Marks arrays with a name and their rank.

    `jax.vmap` increases the rank of the arrays, but not the recorded rank.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, f"{name}/{jnp.ndim(x)}"), tree)
