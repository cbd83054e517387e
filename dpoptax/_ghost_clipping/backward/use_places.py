"""Places the sums of uses in the parameters."""

import collections
import dataclasses
import functools
import operator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dpoptax._ghost_clipping.make_plan import read_use
from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex
from dpoptax._losses.program import Program, Use
from dpoptax._losses.views import View
from dpoptax._points.points import GradientPoints
from dpoptax._support.tree import PyTree, float32_at_least

# The clipped sum, shaped like the parameters, and the sum of the geometry's statistic, if any.
UseTotal: TypeAlias = tuple[PyTree, jax.Array | None]


class UsePlaces:
    """Places the sums of the uses of a program in its parameters.

    Attributes:
      leaves: the parameters.
      specs: how each parameter is sharded.
      added: the number of sums that are added for each parameter.
    """

    def __init__(self, program: Program, leaves: Arrays, specs: PyTree) -> None:
        self.leaves = leaves
        self.specs = [P()] * len(leaves) if specs is None else jax.tree.leaves(specs)
        self.added = collections.Counter([leaf_of(u) for u in program.uses] + list(program.opaque))
        self._uses = program.uses
        self._shapes = [tuple(x.shape) for x in program.parameters]
        self._axes = {u.index: _parameter_axes(u, self._shapes[leaf_of(u)]) for u in program.uses}

    def spec(self, use: Use) -> P:
        """Returns how the sum of a use is sharded, in one step of its scans."""
        return _use_spec(use, self._axes[use.index], self.specs)

    def join(self, sums: ByIndex, opaque: ByIndex) -> Arrays:
        """Returns the sums of parameters from those of uses and opaque parameters."""
        found = collections.defaultdict(list)
        for use in self._uses:
            leaf = leaf_of(use)
            total = _place(use, sums[use.index], self._axes[use.index], self._shapes[leaf])
            found[leaf].append(total)
        for leaf, total in opaque.items():
            found[leaf].append(total)
        return [
            functools.reduce(operator.add, found[i]).astype(x.dtype) if i in found else x
            for i, x in enumerate(self.zeros())
        ]

    def zeros(self) -> Arrays:
        """Returns sums of zero."""
        return [jnp.zeros(x.shape, float32_at_least(x)) for x in self.leaves]


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


def _parameter_axes(use: Use, shape: tuple[int, ...]) -> list[int | None] | None:
    """Returns the parameter's axis for each axis of a use's sum, `None` for size 1.

    The result is `None` if the sum is not the parameter with permuted axes.
    """
    axes = View.identity(0, shape).axes
    view = view_of_use(use)
    if any(runs and runs not in axes for runs in view.axes):
        return None
    found = [axes.index(runs) if runs else None for runs in view.axes]
    missing = {i for i, runs in enumerate(axes) if runs} - set(found)
    return None if missing else found


def _use_spec(use: Use, axes: list[int | None] | None, leaf_specs: list[P]) -> P:
    """Returns how the sum of a use is sharded, in one step of its scans."""
    if axes is None:
        return P()
    spec = leaf_specs[leaf_of(use)]
    names = [None if i is None or i >= len(spec) else spec[i] for i in axes]
    return P(*names[len(use.loops) :])


def _place(
    use: Use, total: jax.Array, axes: list[int | None] | None, shape: tuple[int, ...]
) -> jax.Array:
    """Returns the sum of a use in the shape of its parameter."""
    if axes is not None:  # a transposition, since reshapes would gather sharded axes
        unit = tuple(i for i, axis in enumerate(axes) if axis is None)
        kept = [axis for axis in axes if axis is not None]
        order = sorted(range(len(kept)), key=kept.__getitem__)
        return jnp.squeeze(total, unit).transpose(order).reshape(shape)
    view = dataclasses.replace(view_of_use(use), scale=1.0)  # the factors include the scale
    return view.scatter(total, shape)
