"""Sums the clipped gradients of a batch with an engine, in micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from dpoptax._gradients.clip.block_sums import WholeBatch
from dpoptax._gradients.clipped_grad.engines import Engine
from dpoptax._gradients.clipped_grad.microbatches import in_microbatches
from dpoptax._gradients.ghost_clipping.trace.trace_loss import Examples, trace_batch
from dpoptax._gradients.points import GradientPoints
from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax._gradients.ghost_clipping.backward.batch_devices import BatchDevices


@dataclasses.dataclass(frozen=True)
class BatchSum:
    """Sums clipped gradients on one device.

    Attributes:
      loss_fn: the loss of one example.
      has_aux: whether it returns (loss, aux).
      engine: how one micro-batch is summed.
      microbatch_size: the number of examples computed at once; `None` for all.
    """

    loss_fn: Callable[..., PyTree]
    has_aux: bool
    engine: Engine
    microbatch_size: int | None

    def __call__(
        self,
        points: GradientPoints,
        records: tuple[PyTree, PyTree],
        mask: jax.Array,
        key: jax.Array | None,
        whole: WholeBatch | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Returns the sum as the clip encodes it, and the auxiliary outputs.

        Args:
          points: the gradient points.
          records: the examples (B, …), and their indices (B,) if there is a key.
          mask: (B,), True for examples.
          key: the key of a loss with randomness.
          whole: the batch of all devices; `None` for these examples.
        """
        total, aux = self.parts(points, records, mask, key, whole or WholeBatch(mask.shape[0]))
        return self.engine.join(points.points[0], total), aux

    def parts(
        self,
        points: GradientPoints,
        records: tuple[PyTree, PyTree],
        mask: jax.Array,
        key: jax.Array | None,
        whole: WholeBatch,
        **over: "BatchDevices",
    ) -> tuple[PyTree, PyTree]:
        """Returns the total before `Engine.join`. The arguments `over` go to the engine."""
        batch, ids = records
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, ids)

        def microbatch_sum(batch_and_keys: PyTree, mask: jax.Array) -> tuple[PyTree, PyTree]:
            batch, keys = batch_and_keys
            examples = Examples(batch, mask, keys, whole)
            loss = trace_batch(self.loss_fn, points, examples, has_aux=self.has_aux)
            return self.engine.sum(loss, points, examples, **over)

        return in_microbatches(microbatch_sum, self.microbatch_size)((batch, keys), mask)
