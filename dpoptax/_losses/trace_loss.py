"""Traces the loss of one example and checks it. All engines start here."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from dpoptax import _losses
from dpoptax._losses.check_loss import (
    check_parameters,
    check_result,
    failure_note,
    warn_of_constants,
)
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.jaxprs import JOINT_ON_TPU, MAY_MIX_EXAMPLES, equations
from dpoptax._support.tree import PyTree


class Examples(NamedTuple):
    """Holds the examples that one device sums at once.

    Attributes:
      batch: the examples ξ_i, leaves (B, …).
      mask: (B,), True for examples and False for padding.
      whole: the batch of all micro-batches and devices.
      keys: one key for each example, or `None`.
    """

    batch: PyTree
    mask: jax.Array
    whole: WholeBatch
    keys: jax.Array | None = None

    @property
    def inputs(self) -> list[jax.Array]:
        """Returns the arrays that are passed to the loss along with the parameters."""
        return jax.tree.leaves((self.batch, self.keys))


@dataclasses.dataclass(frozen=True, eq=False)
class TracedLoss:
    """Holds a loss and its checked program for one example.

    Attributes:
      function: `function(params, example, key)` returns (loss, aux). Key and aux may be `None`.
      program: the program. Its first operands are the parameters.
      parameters: the number of parameters.
      result_tree: the structure of (loss, aux).
      is_mapped: whether `jax.vmap` maps all operations, which then keep examples separate.
    """

    function: Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
    program: ClosedJaxpr
    parameters: int
    result_tree: jax.tree_util.PyTreeDef
    is_mapped: bool

    def separate(self, mask: jax.Array) -> jax.Array:
        """Returns the mask (B,), all False if the platform mixes examples.

        For the default platform, an error is raised earlier. A program may be compiled for another
        platform.
        """
        joint = (eqn.primitive.name in JOINT_ON_TPU for eqn in equations(self.program))
        if self.is_mapped or not any(joint):
            return mask
        return lax.platform_dependent(mask, tpu=jnp.zeros_like, default=lambda mask: mask)

    def aux(self, outputs: Sequence[jax.Array]) -> PyTree:
        """Returns the auxiliary outputs of the flat outputs of the program."""
        return jax.tree.unflatten(self.result_tree, outputs)[1]


def trace_loss(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    example: PyTree,
    key: jax.Array | jax.ShapeDtypeStruct | None,
    *,
    has_aux: bool,
) -> TracedLoss:
    """Traces `loss_fn(params, example[, key])`.

    Raises an error if the loss may mix examples, and warns of large constants. The arguments are
    arrays or shape structs of one example. `key` is `None` for a loss without randomness.
    """
    check_parameters(params)

    def function(params: PyTree, example: PyTree, key: PyTree) -> tuple[jax.Array, PyTree]:
        args = (params, example) if key is None else (params, example, key)
        try:
            out = loss_fn(*args)
        except Exception as error:
            error.add_note(failure_note(error, example, key is not None))
            raise
        return out if has_aux else (out, None)

    program, shapes = jax.make_jaxpr(function, return_shape=True)(params, example, key)
    parameters = len(jax.tree.leaves(params))
    check_result(shapes, has_aux)
    # Most losses need no further check, which would also trace derivatives.
    is_mapped = not program.effects and all(map(_is_mapped, equations(program)))
    if not is_mapped:
        _losses.example_separation.check_separate(program, parameters)
    warn_of_constants(program)
    return TracedLoss(function, program, parameters, jax.tree.structure(shapes), is_mapped)


def _is_mapped(eqn: JaxprEqn) -> bool:
    """Returns whether `jax.vmap` maps an operation and its derivative without a special rule."""
    name = eqn.primitive.name
    return not ("callback" in name or "vmap_method" in eqn.params or name in MAY_MIX_EXAMPLES)
