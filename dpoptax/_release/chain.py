"""Chains a noise stage and other transforms, and checks where gradients were taken."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from dpoptax._clipped_sum.clip_per_example import ClipPerExampleState, clip_per_example
from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import Clip
from dpoptax._points.points import AT_PARAMETERS, POINTS_REMEDY, unused_trackers
from dpoptax._release.gaussian import gaussian_noise
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
        return updates.terms.points_code
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ClipPerExampleState))
    return AT_PARAMETERS if any(isinstance(x, ClipPerExampleState) for x in nodes) else 0


def clip_and_noise(
    clip: Clip | float,
    *,
    noise_multiplier: float | Mapping[int, float],
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clips per-example gradients, sums them, and adds Gaussian noise.

        release_t = (Σ_i clip(g_i) + σ C N(0, I)) / B,   for leaves (examples, …)

    This chains `clip_per_example` and `gaussian_noise`; see there for shapes, units, privacy and
    errors. `update(grads, state, params, mask=mask)` leaves out the padding of a sampler's draw. It
    needs memory for all per-example gradients; `clipped_grad` does not.

    Args:
      clip: the geometry. A number C means `l2_clip(C)`.
      noise_multiplier: σ, relative to the clipping bound, or a schedule.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.
      fixed_point: whether the guarantee holds for every bit of the release; see `gaussian_noise`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> clip = dpoptax.l2_clip(1.0)
    >>> tx = clip_and_noise(clip, noise_multiplier=0.0, batch_size=2, key=jax.random.key(0))
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> mean, _ = tx.update(grads, tx.init(params), params)
    >>> mean["w"]
    Array([0.449..., 0.599...], dtype=float32)
    """
    return optax.chain(
        clip_per_example(clip),
        gaussian_noise(
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            key=key,
            fixed_point=fixed_point,
        ),
    )
