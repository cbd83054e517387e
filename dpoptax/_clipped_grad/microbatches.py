"""Sums the clipped gradients of a batch with an engine, in micro-batches to save memory."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from optax import microbatching

from dpoptax._clipped_grad.engines import Engine, checked_size
from dpoptax._losses.microbatch_rule import microbatch_rule
from dpoptax._losses.trace_loss import Examples, TracedLoss, trace_loss
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import block_sums
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.jaxprs import SPARSE, equations, updates_per_entry
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import device_of, materialize

# Names of the primitives that `xla_rewrites` has rules for.
_REWRITTEN = ("conv_general_dilated", "select_and_scatter_add")

# `sums(batch, mask)`: the total over the examples, and their auxiliary outputs.
MaskedSum: TypeAlias = Callable[[PyTree, jax.Array], tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True)
class BatchSum:
    """Sums clipped gradients on one device.

    Attributes:
      loss_fn: the loss of one example.
      has_aux: whether it returns (loss, aux).
      engine: how one micro-batch is summed.
      microbatch_size: the number of examples computed at once; `None` for the rule's.
      mesh: the devices that share the batch; `None` for JAX's default device.
    """

    loss_fn: Callable[..., PyTree]
    has_aux: bool
    engine: Engine
    microbatch_size: int | None
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None

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
        total, aux = self.unjoined(points, records, mask, key, whole or WholeBatch(mask.shape[0]))
        # Stored, so that the compiler does not compute the sum again for each of its readers. These
        # read their part of a stored bundle, without a copy.
        return self.engine.join(points.points[0], materialize(total)), aux

    def unjoined(
        self,
        points: GradientPoints,
        records: tuple[PyTree, PyTree],
        mask: jax.Array,
        key: jax.Array | None,
        whole: WholeBatch,
        **over: Any,
    ) -> tuple[PyTree, PyTree]:
        """Returns the total before `Engine.join`. The arguments `over` go to the engine."""
        batch, ids = records
        # By the record's id and not its row, so other records in the batch do not change its key.
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
        example, one_key = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys)
        )
        loss = trace_loss(self.loss_fn, points.points[0], example, one_key, has_aux=self.has_aux)

        def microbatch_sum(batch_and_keys: PyTree, mask: jax.Array) -> tuple[PyTree, PyTree]:
            batch, keys = batch_and_keys
            examples = Examples(batch, loss.separate(mask), whole, keys)
            return self.engine.sum(loss, points, examples, **over)

        sums = _rewrite_for_xla(microbatch_sum, private=True)
        return _in_microbatches(sums, self._size(loss, len(mask)))((batch, keys), mask)

    def _size(self, loss: TracedLoss, rows: int) -> int | None:
        """Returns the number of examples that are computed at once; `None` for all."""
        if self.microbatch_size is not None or self.engine.in_backward:
            return self.microbatch_size
        return microbatch_rule(loss, rows, device_of(self.mesh).platform)


def in_microbatches(sums: MaskedSum, microbatch_size: int | None) -> MaskedSum:
    """Computes `sums` in a loop over micro-batches, to save memory.

        (Σ_k total_k, (aux_1, …, aux_n)),  where  total_k, aux_k = sums(batch_k, mask_k)

    The result differs from `sums(batch, mask)` by rounding only. `clipped_grad` uses it for its
    `microbatch_size`. Use it directly for sums without privacy, such as the gradient of a baseline.
    Convolutions that XLA computes wrongly, or slowly in loops, are rewritten.

    Privacy: as for `sums`, because nothing is clipped or noised here.

    Args:
      sums: `sums(batch, mask) -> (total, aux)`: a sum over the examples for which `mask`, (B,), is
        True, and outputs with a row for each example, (B, …), or `None`. Every leaf of `batch` has
        the examples as its leading axis.
      microbatch_size: the number of examples computed at once; `None` for all. A batch that it does
        not divide is padded with its first example, masked out.

    Raises:
      ValueError: `microbatch_size` is below 1.

    >>> total = in_microbatches(lambda x, mask: (jnp.sum(x, where=mask), 2 * x), 2)
    >>> total(jnp.array([1.0, 2.0, 3.0]), jnp.array([True, True, False]))
    (Array(3., dtype=float32), Array([2., 4., 6.], dtype=float32))
    """
    # Also without micro-batches, as the whole step may be in a loop.
    return _in_microbatches(_rewrite_for_xla(sums, private=False), microbatch_size)


def _in_microbatches(sums: MaskedSum, microbatch_size: int | None) -> MaskedSum:
    if microbatch_size is None:
        return sums
    microbatch_size = checked_size(microbatch_size)

    def run(batch: PyTree, mask: jax.Array) -> tuple[PyTree, PyTree]:
        examples = mask.shape[0]
        if microbatch_size >= examples:
            return sums(batch, mask)
        # The number of rows up to the next multiple.
        missing = -examples % microbatch_size
        if missing:

            def pad(x: jax.Array) -> jax.Array:
                return jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])

            batch = jax.tree.map(pad, batch)
            mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        # `layout_rounding` covers a plain sum of few parts, which reads and writes less.
        few = len(mask) // microbatch_size <= block_sums.FLOAT_TOTALS
        kinds = (
            microbatching.AccumulationType.SUM if few else _COMPENSATED_SUM,
            microbatching.AccumulationType.CONCAT,
        )
        part = jax.jit(sums)  # traced once, for the shapes and for the loop
        like, _ = jax.eval_shape(part, *jax.tree.map(lambda x: x[:microbatch_size], (batch, mask)))
        total, aux = microbatching.microbatch(
            part,
            argnums=(0, 1),
            microbatch_size=microbatch_size,
            accumulator=kinds,
            in_axes=(0, 0),
        )(batch, mask)

        def finish(x: jax.Array, like: jax.Array) -> jax.Array:
            # A compensated sum of floats is complex.
            return x if x.dtype == like.dtype else x.real.astype(like.dtype)

        return jax.tree.map(finish, total, like), jax.tree.map(lambda x: x[:examples], aux)

    return run


def _rewrite_for_xla(fun: Callable[..., PyTree], *, private: bool) -> Callable[..., PyTree]:
    """Returns `fun` with operations rewritten that XLA computes wrongly, or slowly on CPU.

    In a `private` sum, scatters on GPUs become independent of the order of updates.
    """
    # `jit` keeps the trace that `make_jaxpr` made, so a call of `traced` does not trace again.
    traced = jax.jit(fun)

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args)
        if not any(_may_need_rewrite(eqn, private) for eqn in equations(closed.jaxpr)):
            return traced(*args)
        from dpoptax._clipped_grad.rewrites import rewriting, scatter_order, xla_rewrites

        def rule(eqn: JaxprEqn, constants: rewriting.Constants) -> Callable[..., Any] | None:
            order = scatter_order.rule(eqn, constants) if private else None
            return order or xla_rewrites.rule(eqn, constants)

        if not rewriting.applies(rule, closed):
            return traced(*args)
        results = rewriting.evaluate(closed, rule, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _zeros(value: PyTree) -> PyTree:
    def zeros(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.zeros(
            x.shape, jnp.promote_types(x.dtype, jnp.complex64) if is_float else x.dtype
        )

    return jax.tree.map(zeros, value)


def _add(carry: PyTree, value: PyTree, part: jax.Array) -> PyTree:
    """Adds a part to the total, and carries the rounding error along.

    The total of many parts then rounds as a single addition would.
    """
    del part

    def add(carry: jax.Array, value: jax.Array) -> jax.Array:
        # Only the totals of floats have another type, which `_zeros` chose.
        same = carry.dtype == value.dtype
        return carry + value if same else block_sums.compensated_add(carry, value)

    return jax.tree.map(add, carry, value)


_COMPENSATED_SUM = microbatching.Accumulator(
    init=_zeros,
    update=_add,
    finalize=lambda carry: carry,
    # Only `micro_vmap` aggregates. It is not used here.
    aggregate=lambda values: jax.tree.map(lambda x: jnp.sum(x, axis=0), values),
)


def _may_need_rewrite(eqn: JaxprEqn, private: bool) -> bool:
    """Returns whether `xla_rewrites` or, in a private sum, `scatter_order` may have a rule."""
    name = eqn.primitive.name
    if name in _REWRITTEN:
        return True
    # One update of each entry has no order.
    ordered = name.startswith("scatter") and updates_per_entry(eqn) > 1
    return private and (ordered or name.startswith(SPARSE))
