"""Finds parameters whose gradients are exactly zero, so that they would receive only noise.

The loss does not use them, or only without a gradient, as behind `jax.lax.stop_gradient`: a trace
of the loss shows this. Or the loss compares a value with itself: batch normalization of one example
does, and a softmax over one entry. Then a gradient shows it. Norms, bounds and sums do not depend
on the result, which is only used in messages.
"""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dpoptax._losses.traced_program import Program
from dpoptax._support.tree import PyTree

_LISTED_NAMES = 8  # of parameters in a message
# Parameters are moved by as much, since many are zero at first. That alone makes gradients zero.
_MOVED = 0.02
_DRAWS = 3


def find_zero_gradients(loss: Callable[..., jax.Array], *args: PyTree) -> frozenset[int]:
    """Returns the leaves of the first argument whose gradients are zero at points near it.

    The result is empty if an argument holds shapes or traced arrays.
    """
    unknown = jax.ShapeDtypeStruct | jax.core.Tracer
    if any(isinstance(x, unknown) for x in jax.tree.leaves(args)):
        return frozenset()
    params, *rest = args
    gradient, found = jax.jit(jax.grad(loss)), set(range(len(jax.tree.leaves(params))))
    for seed in range(_DRAWS):
        grads = jax.tree.leaves(gradient(_moved(params, seed), *rest))
        # A gradient may be zero at one point by chance, such as behind an inactive ReLU.
        found &= {i for i, g in enumerate(grads) if g.size and not jnp.any(g)}
    return frozenset(found)


def _moved(params: PyTree, seed: int) -> PyTree:
    drawn = optax.tree.random_like(jax.random.key(seed), params)
    return jax.tree.map(lambda x, change: x + _MOVED * change, params, drawn)


def describe_unused(unused: frozenset[int], params: PyTree) -> str:
    """Describes parameters from which no gradient flows, and remedies; empty for none."""
    if not unused:
        return ""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [paths[leaf] or "the parameter" for leaf in sorted(unused)]
    return (
        "These parameters get gradients of exactly zero and receive only noise, because "
        "`loss_fn` does not use them, or uses them only without a gradient, as behind "
        f"`jax.lax.stop_gradient`: {_join_names(names)}. Remove them from the parameters. If "
        "`loss_fn` needs them, pass them to `dpoptax.training.fit` as `frozen`, or make them "
        "an argument of the jitted step and call `dpoptax.clipped_grad` inside it with a loss "
        "that closes over them."
    )


def describe_constant(names: list[str]) -> str:
    """Describes other parameters with zero gradients, and remedies; empty for none."""
    if not names:
        return ""
    return (
        f"These parameters get gradients of exactly zero for the example: {_join_names(names)}. "
        "With such gradients for all examples, they receive only noise. `loss_fn` sees one example "
        "at a time, and may compare a value with itself. Batch normalization subtracts the mean of "
        "one row: use GroupNorm or LayerNorm, or freeze the running averages. A loss that compares "
        "the examples of a batch, such as a contrastive, Cox or ranking loss, is not a sum over "
        "examples: let each example hold the group that is compared, or compare with public or "
        "frozen values."
    )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return ", ".join(names[:_LISTED_NAMES]) + more


def warn_of_unused(program: Program, params: PyTree) -> None:
    """Warns of parameters from which no gradient flows to the loss."""
    if text := describe_unused(program.unused, params):
        from dpoptax._support.callers import level_of_caller

        warnings.warn(f"{text} `dpoptax.explain` lists them.", stacklevel=level_of_caller())
