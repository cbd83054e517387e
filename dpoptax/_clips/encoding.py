"""Encodes gradients before they are scaled, and decodes the noisy mean.

Most clips only scale gradients. A clip that bounds another quantity is an `EncodingClip`.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from dpoptax._clips.clip import Clip
from dpoptax._support.tree import PyTree


class EncodingClip(Clip):
    """Base class of clips that encode gradients, or depend on their own noise stage.

    Attributes:
      encodes: whether `encode` differs from the identity.
      by_norms: whether `encode` scales by a function of the norm and adds one number. Ghost
        clipping then uses `scaling`, `statistic` and `join` instead of `encode`. A clip that
        encodes in another way needs per-example gradients.
      own_stage: the name of the only noise stage for the clip, which keeps its reference or
        accounts for more than the noise; `None` for any stage.
      selects: whether rows of a table were released for the sum.
    """

    encodes: ClassVar[bool] = True
    by_norms: ClassVar[bool] = False
    own_stage: ClassVar[str | None] = None
    selects: ClassVar[bool] = False

    def encode(self, grads: PyTree, reference: PyTree) -> PyTree:
        """Encodes gradients, leaves (B, …), before they are scaled; here the identity.

        The result must not be finite for an example whose gradient is not finite. `reference` is
        public.
        """
        del reference
        return grads

    def scaling(self, reference: PyTree) -> Clip:
        """Returns the clip whose factors `encode` scales gradients by; here itself."""
        del reference
        return self

    def statistic(self, norms: jax.Array, reference: PyTree) -> jax.Array | None:
        """Returns the number that `encode` adds to each gradient, (B,); here `None`.

        Statistics must be multiples of one number, up to 2⁸ times it, so that sums of 2¹⁶
        statistics are exact.
        """
        del norms, reference
        return None

    def join(self, gradient: PyTree, statistic: jax.Array | None) -> PyTree:
        """Joins sums of scaled gradients and of statistics to the sum of encodings."""
        del statistic
        return gradient

    def decode(self, mean: PyTree, reference: PyTree) -> PyTree:
        """Returns the gradient that the noisy mean encodes, shaped like the parameters."""
        del reference
        return mean


class UnitClip(EncodingClip):
    """Base class of clips that encode each gradient with l2 norm at most 1."""

    @property
    def sensitivity(self) -> float:
        """Returns 1, the bound of every encoded gradient."""
        return 1.0

    def factors(self, norms: jax.Array) -> jax.Array:
        """Clamps the norm to 1 after rounding."""
        return jnp.minimum(1.0, 1.0 / norms)


def encodes(clip: Clip) -> bool:
    """Returns whether a clip bounds another quantity than the gradient."""
    return isinstance(clip, EncodingClip) and clip.encodes


def selects(clip: Clip) -> bool:
    """Returns whether a clip is for rows of a table that its noise stage selects."""
    return isinstance(clip, EncodingClip) and clip.selects


def own_stage(clip: Clip) -> str | None:
    """Returns the name of the only noise stage for a clip; `None` for any stage."""
    return clip.own_stage if isinstance(clip, EncodingClip) else None


def scaling(clip: Clip, reference: PyTree) -> Clip:
    """Returns the clip whose factors scale the gradients; for most, the clip itself."""
    return clip.scaling(reference) if isinstance(clip, EncodingClip) else clip


def join(clip: Clip, gradient: PyTree, statistic: jax.Array | None) -> PyTree:
    """Returns the sum of encodings from the sums of scaled gradients and of statistics."""
    return clip.join(gradient, statistic) if isinstance(clip, EncodingClip) else gradient
