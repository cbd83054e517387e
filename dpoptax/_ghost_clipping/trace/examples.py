"""Holds the examples of one sum."""

from typing import NamedTuple

import jax

from dpoptax._clip.block_sums import WholeBatch
from dpoptax._tree import PyTree


class Examples(NamedTuple):
    """Holds the examples that one device sums at once.

    Attributes:
      batch: the examples ξ_i, leaves (B, …).
      mask: (B,), True for examples and False for padding.
      keys: one key for each example, or `None`.
      whole_batch: the batch of all micro-batches and devices; `None` for these examples only.
    """

    batch: PyTree
    mask: jax.Array
    keys: jax.Array | None = None
    whole_batch: WholeBatch | None = None

    @property
    def whole(self) -> WholeBatch:
        """Returns the batch of all micro-batches and devices."""
        return self.whole_batch or WholeBatch(self.mask.shape[0])

    @property
    def inputs(self) -> list[jax.Array]:
        """Returns the arrays that are passed to the loss along with the parameters."""
        return jax.tree.leaves((self.batch, self.keys))
