"""Adaptive clipping per sample."""

import dataclasses

import jax

from dpoptax._clips.clip import BoundedClip, clip_norm, positive


@dataclasses.dataclass(frozen=True)
class PsacClip(BoundedClip):
    """Scales to C/(‖g‖ + r/(‖g‖ + r)) g; see `psac_clip`."""

    r: float

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns C/(‖g‖ + r/(‖g‖ + r))."""
        return self.l2_clip_norm / (norms + self.r / (norms + self.r))


def psac_clip(l2_clip_norm: float, r: float = 0.1) -> PsacClip:
    """Clips per sample adaptively: g ↦ C g/(‖g‖ + r/(‖g‖ + r)).

    Long gradients are normalized to C. Short ones are multiplied by about C, since the denominator
    tends to 1 as ‖g‖ tends to 0. Unlike with `automatic_clip`, examples with vanishing gradients do
    not outweigh the others.

    Privacy: one example adds at most C to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C, from 1e-12 to 1e9.
      r: r > 0, in the units of the gradient's norm.

    Raises:
      ValueError: a number is outside its range.

    Source: Xia et al., "Differentially Private Learning with Per-Sample Adaptive Clipping", 2023.

    >>> import jax.numpy as jnp
    >>> psac_clip(2.0).factors(jnp.array([0.0, 0.4]))
    Array([2.       , 3.3333...], dtype=float32)
    """
    return PsacClip(clip_norm("l2_clip_norm", l2_clip_norm), positive("r", r))
