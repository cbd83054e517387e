"""Finds the places of uses in their parameters."""

from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec as P

from dpoptax._ghost_clipping.make_plan import read_use
from dpoptax._losses.program import Program, Use
from dpoptax._losses.views import View
from dpoptax._points.points import GradientPoints
from dpoptax._support.tree import PyTree

# The clipped sum, shaped like the parameters, and the sum of the geometry's statistic, if any.
UseTotal: TypeAlias = tuple[PyTree, jax.Array | None]


def leaf_of(use: Use) -> int:
    """Returns the only parameter of a use."""
    (leaf,) = use.value.leaves
    return leaf


def view_of_use(use: Use) -> View:
    """Returns the entries of the only parameter of a use."""
    planned = read_use(use)
    assert planned is not None
    return planned.view


def check_uses(program: Program, points: GradientPoints, method: str) -> None:
    """Raises an error if uses cannot be summed separately, as a method requires."""
    obstacle = _find_obstacle(program, points)
    if obstacle is not None:
        raise ValueError(f"`method={method!r}` must have {obstacle} Leave the option out.")


def _find_obstacle(program: Program, points: GradientPoints) -> str | None:
    """Returns why uses cannot be summed separately, as part of an error; `None` if they can."""
    params = points.points[0]
    unweighted = isinstance(points.weights[0], float) and points.weights == (1.0,)
    if not unweighted:
        return "one gradient point of weight 1.0, and methods such as `dpoptax.disk` have several."
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path) or "the parameter" for path, _ in leaves]
    for use in program.uses:
        names = ", ".join(paths[leaf] for leaf in sorted(use.value.leaves))
        if read_use(use) is None:
            return (
                "parameters that are only moved or scaled before they meet data, and "
                f"{names} is computed on before {use.rule.name}."
            )
        if not all(stacked for _, stacked in use.loops):
            return (
                "a slice of each parameter for each step of a loop, and all steps use the whole of "
                f"{names}."
            )
    return None


def spec_of_sum(use: Use, shape: tuple[int, ...], specs: list[P]) -> P:
    """Returns how the sum of a use is sharded, in one step of its scans.

    It is sharded like the parameter if it is the parameter with permuted axes.
    """
    spec, axes, own = specs[leaf_of(use)], View.identity(0, shape).axes, view_of_use(use).axes
    if {runs for runs in own if runs} != {runs for runs in axes if runs}:
        return P()
    names = [
        spec[axes.index(runs)] if runs and axes.index(runs) < len(spec) else None for runs in own
    ]
    return P(*names[len(use.loops) :])
