"""What clip geometries follow: the transform whose state remembers a release."""

import optax

from dpoptax._clip.clipped_sum import check_released
from dpoptax._points import ReferenceState, check_origin
from dpoptax._serialization import register
from dpoptax._tree import PyTree


def track_reference() -> optax.GradientTransformation:
    """Passes updates through and remembers the last one, as the reference of clip geometries.

    Behind the noise stage the reference is the last released mean gradient, and behind a filter the
    filtered one. `dpoptax.contrib.hyperspherical_clip` measures angles from its direction.
    Memory: one copy of the parameters. Privacy: post-processing; the update must be a release, so
    the stage that adds noise must come before this one.

    Returns:
      An `optax.GradientTransformation`. Before the first update the reference is zero.

    Raises:
      TypeError: at `update`, a `ClippedSum`, which is private: the stage is in front of the noise.
      ValueError: at `update`, a release of gradients that were taken without the reference.

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
        check_origin(updates, lambda origin: origin.reference)
        return updates, ReferenceState(optax.tree.cast_like(updates, state.reference))

    return optax.GradientTransformation(init_fn, update_fn)
