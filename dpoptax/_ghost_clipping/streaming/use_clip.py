"""Clips and sums the gradients of one use, separately from other uses."""

import dataclasses

import jax

from dpoptax._clips.clip import Clip
from dpoptax._ghost_clipping.backward.use_sum import UseSum, tau_of_parts
from dpoptax._rounding import block_sums, bounds
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.bounds import Piece


@dataclasses.dataclass(frozen=True)
class Part:
    """Holds the clip of one part of the gradient.

    `added` is the number of parts that are added to each entry.
    """

    clip: Clip
    added: int

    def tau(self, whole: WholeBatch, *roundings: block_sums.Rounding) -> float:
        """Returns τ of the sum of the part, with room for adding the other parts."""
        return tau_of_parts(whole, roundings, self.added)


@dataclasses.dataclass(frozen=True, eq=False)
class UseClip(UseSum):
    """Clips and sums the gradients of one use, separately from other uses.

    `given` is the mask, (B,).

    Attributes:
      part: the clip.
      whole: the batch of all devices.
    """

    part: Part
    whole: WholeBatch

    def coefficients(
        self, piece: Piece, given: jax.Array, rounding: block_sums.Rounding
    ) -> jax.Array:
        coefficients, _, _ = bounds.clip_coefficients(
            self.part.clip,
            [piece],
            given,
            group_count=1,
            tau=self.part.tau(self.whole, rounding),
        )
        return coefficients[0]
