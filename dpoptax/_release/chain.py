"""Chains a noise stage and other transforms, and checks where gradients were taken."""

from typing import Any

import jax
import optax

from dpoptax._clipped_sum.clip_per_example import ClipPerExampleState
from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._points.points import AT_PARAMETERS, POINTS_REMEDY, unused_trackers
from dpoptax._support.tree import PyTree


def chain(*transforms: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Chains transforms like `optax.chain`, and checks the points of the gradients.

    `disk`, `pmlf` and others have no effect unless the gradients are taken at
    `dpoptax.gradient_points(opt_state, params)`. With this chain, other gradients raise an error
    while the step is traced. With `optax.chain`, `dpoptax.ledgers` warns after the first release.
    The check does not depend on the transforms between the noise stage and the method.

    Points that were made by hand are not checked. Privacy: as in `optax.chain`. Wrong points cost
    utility but not privacy.

    Args:
      *transforms: the transforms, first the noise stage.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `optax.chain`.

    Raises:
      ValueError: at `update`, the clipped sum was taken at other points than those of a method in
        the chain.

    >>> import dpoptax, jax
    >>> noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=8, key=jax.random.key(0))
    >>> tx = chain(noise, dpoptax.disk(), optax.adam(1e-3))
    """
    chained = optax.with_extra_args_support(optax.chain(*transforms))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        # The empty path is the root of the chain, so each tracker in it is compared with this sum.
        unused = unused_trackers(state, [((), _points_of(updates, state))])
        if unused:
            raise ValueError(
                f"The gradients must be taken at this method's points (at {unused}), "
                f"{POINTS_REMEDY}"
            )
        return chained.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(chained.init, update_fn)


def _points_of(updates: PyTree, state: PyTree) -> int:
    """Returns the code of the points of the sum that the chain gets or computes; 0 if unknown."""
    if isinstance(updates, ClippedSum):
        return updates.terms.points
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ClipPerExampleState))
    return AT_PARAMETERS if any(isinstance(x, ClipPerExampleState) for x in nodes) else 0
