"""A transform whose state keeps a release as the reference of clip geometries."""

import dataclasses

import optax

from dpoptax._clipped_sum.clipped_sum import check_released
from dpoptax._points.points import ReferenceState
from dpoptax._support.serialization import register
from dpoptax._support.tree import PyTree


def track_reference() -> optax.GradientTransformation:
    """Keeps the last update as the reference of clip geometries.

    It passes updates through. After the noise stage, the reference is the last released mean
    gradient; after a filter, it is the filtered one. `dpoptax.contrib.hyperspherical_clip` measures
    angles from its direction. Memory: one copy of the parameters. Privacy: post-processing. The
    update must be a release, so place this stage after the noise stage.

    Returns:
      An `optax.GradientTransformation`. Before the first update the reference is zero.

    Raises:
      TypeError: at `update`, this stage precedes the noise stage and gets a private `ClippedSum`.

    >>> import jax.numpy as jnp
    >>> tx = track_reference()
    >>> tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))[1].reference
    Array([1., 1.], dtype=float32)
    """

    def init_fn(params: PyTree) -> ReferenceState:
        register()
        return ReferenceState(optax.tree.zeros_like(params))

    def update_fn(
        updates: PyTree, state: ReferenceState, params: PyTree = None
    ) -> tuple[PyTree, ReferenceState]:
        del params
        check_released("track_reference", updates)
        reference = optax.tree.cast_like(updates, state.reference)
        return updates, dataclasses.replace(state, reference=reference)

    return optax.GradientTransformation(init_fn, update_fn)
