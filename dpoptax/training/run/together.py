"""Runs that differ in the learning rate alone, as one program that shares what the rate leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from dpoptax.training.run.chain import is_learning_rate

Group = tuple[Any, ...]
"""What each run of a group has of a kind, such as its parameters; of a run alone, just one."""


def step_together(alone: Callable[..., Any]) -> Callable[..., Group]:
    """The step `alone(state, *common) -> state` for the states of a group of runs, (state, …).

    Of one run it is `alone` itself. Of several it is the traced step under `jax.vmap`, over those
    arrays of the state that the learning rate can have changed. All others are the same in
    all runs, as long as the runs began alike, and are computed from the first one's: the noise is
    drawn once from the one key, and the ledger counts once and is given to every run. What does not
    depend on parameters either, such as the batch, is read once.

    Each run's arithmetic is that of the run alone, with sums of products in an order that may be
    another: equal but for rounding.
    """

    def step(states: Group, *common: Any) -> Group:
        first, *others = states
        if not others:
            return (alone(first, *common),)
        traced = jax.make_jaxpr(alone)(first, *common)
        structure = jax.tree.structure(first)
        axes = [0 if own else None for own in _own(traced, first)]
        merged = [
            leaves[0] if axis is None else jnp.stack(leaves)
            for axis, *leaves in zip(axes, *map(jax.tree.leaves, states), strict=True)
        ]
        rest = jax.tree.leaves(common)
        # An array that is shared by its axis and is not by what it is computed from is an error.
        mapped = jax.vmap(
            jaxpr_as_fun(traced), in_axes=[*axes, *(None for _ in rest)], out_axes=axes
        )
        results = mapped(*merged, *rest)
        return tuple(
            jax.tree.unflatten(
                structure,
                [
                    leaf if axis is None else leaf[i]
                    for axis, leaf in zip(axes, results, strict=True)
                ],
            )
            for i in range(len(states))
        )

    return step


def check_alike(states: Sequence[Any]) -> None:
    """Raises unless the states of a group differ in their learning rates alone, bit for bit.

    What `step_together` shares rests on it: the noise key too.
    """
    first, *others = map(jax.tree_util.tree_leaves_with_path, states)
    for other in others:
        for (path, leaf), (_, found) in zip(first, other, strict=True):
            if not is_learning_rate(path) and not np.array_equal(_bits(leaf), _bits(found)):
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} differs between runs that were to advance "
                    "together: they have to differ in the learning rate alone"
                )


def _bits(leaf: jax.Array) -> np.ndarray:
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(leaf) if keys else leaf)
    return np.frombuffer(values.tobytes(), np.uint8)


def _own(traced: ClosedJaxpr, state: Any) -> list[bool]:
    """Of each leaf of a state, whether it may differ in runs that began alike at other rates.

    An array may, if any that it is computed from does: the rate, and whatever it reaches in any
    number of steps.
    """
    own = [is_learning_rate(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    jaxpr = traced.jaxpr
    while True:
        reached = {variable for variable, o in zip(jaxpr.invars, own, strict=False) if o}
        for equation in jaxpr.eqns:
            if any(not isinstance(x, Literal) and x in reached for x in equation.invars):
                reached.update(equation.outvars)
        found = [
            before or (not isinstance(x, Literal) and x in reached)
            for before, x in zip(own, jaxpr.outvars, strict=True)
        ]
        if found == own:
            return own
        own = found


def evaluate_together(alone: Callable[..., Any]) -> Callable[..., Group]:
    """The evaluation `alone(params, *common)` for the parameters of a group, (params, …)."""

    def evaluate(params: Group, *common: Any) -> Group:
        if len(params) == 1:
            return (alone(params[0], *common),)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        results = jax.vmap(alone, in_axes=(0, *(None for _ in common)))(stacked, *common)
        return tuple(jax.tree.map(lambda x, i=i: x[i], results) for i in range(len(params)))

    return evaluate
