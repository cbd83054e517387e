"""Runs a loss whose derivatives compute functions of whole batches.

Each use has a function and a probe. The derivative with respect to the probe is the result of the
function: automatic differentiation calls it instead of summing the gradients of all examples. A
scan stacks its results as it would stack gradients, and `jax.checkpoint` computes its operands
again. A probe has zeros in the shape of the result, with the steps of scans as leading axes.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex, run_block
from dpoptax._losses.traced_program import Program, ProgramStep, Use
from dpoptax._rounding.bounds import within_range
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree

# `function(operand, cotangent, own)` of arrays (B, …), in float32. The result has the axes of the
# rule's layout in one step of the scans. If results are mapped, it is a number for each example.
BatchFunction: TypeAlias = Callable[..., jax.Array]


def run_uses(
    program: Program,
    params: Arrays,
    inputs: Arrays,
    functions: Mapping[int, BatchFunction],
    *,
    own: ByIndex | None = None,
    mapped: bool = False,
    axes: tuple[str, ...] | None = None,
) -> tuple[ByIndex, ByIndex, Arrays]:
    """Runs a batch forward and backward with a `BatchFunction` for each use.

    Args:
      program: the loss of one example.
      params: the parameters.
      inputs: the examples, arrays (B, …).
      functions: the function of each use.
      own: the input of each function, a tree of arrays (B, steps of the use's scans, …); `None` for
        none.
      mapped: whether each result is a number for each example, instead of a sum.
      axes: the mesh axes that the examples are sharded over.

    Returns:
      The results by use, with the steps of scans as leading axes (after B if mapped); the gradients
      of opaque parameters, (B, …); and the outputs of the loss.
    """
    examples = inputs[0].shape[0]
    own = {index: () for index in functions} if own is None else own

    def shape_of(use: Use) -> tuple[int, ...]:
        return () if mapped else use.step_rule.layout.split

    def example(
        probes: ByIndex, opaque: ByIndex, own: ByIndex, inputs: Arrays, number: jax.Array
    ) -> Arrays:
        def run_use(step: ProgramStep, operands: Arrays, own: PyTree) -> tuple[Arrays, None]:
            assert step.use is not None
            function, shape = functions[step.use.index], shape_of(step.use)
            operands = list(operands)
            operands[step.data] = _of_example(operands[step.data], number)
            return [_use_with_probe(step, function, shape, mapped)(operands, *own)], None

        # Parameters are the same for all examples, so a gradient by them would be a sum. The zeros
        # have a row for each example, and so do the gradients by them.
        leaves = [x + opaque[i] if i in opaque else x for i, x in enumerate(params)]
        by_use = {index: (probe, own[index]) for index, probe in probes.items()}
        outputs, _ = run_block(program.block, [*leaves, *inputs], by_use, run_use)
        return outputs

    # A probe with a row for each example gets a result with a row for each. The probe of a sum is
    # one array for all examples, and so is its derivative.
    every = jax.vmap(example, (0 if mapped else None, 0, 0, 0, 0), spmd_axis_name=axes)

    def total(probes: ByIndex, opaque: ByIndex) -> tuple[jax.Array, Arrays]:
        # A loss does not depend on other examples. So each example gets the cotangents of its loss
        # from the gradient of the sum.
        outputs = every(probes, opaque, own, inputs, jnp.arange(examples))
        return outputs[0].sum(), outputs

    def probe(use: Use) -> jax.Array:
        rows, steps = (examples,) if mapped else (), (n for n, _ in use.loops)
        return jnp.zeros((*rows, *steps, *shape_of(use)), jnp.float32)

    # Shapes of zeros that are added to opaque parameters, separately for each example.
    opaque = {i: (examples, *program.parameters[i].shape) for i in program.opaque}
    probes = {use.index: probe(use) for use in program.uses}
    zeros = {i: jnp.zeros(s, program.parameters[i].dtype) for i, s in opaque.items()}
    try:
        (found, gradients), outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(probes, zeros)
    except NotImplementedError as error:
        if "'stop_gradient'" not in str(error):
            raise
        raise ValueError(
            "`loss_fn` must not contain a `jax.custom_jvp` whose tangents depend on a branch of "
            "`jax.lax.cond`, because JAX cannot differentiate a batch of branches in reverse. The "
            "methods 'recompute' and 'streaming' need this. Multiply the tangents by numbers that "
            "depend on the condition, define the derivative by `jax.custom_vjp`, or use "
            "`method='auto'`."
        ) from error
    return found, gradients, outputs


# Privacy: an array that is equal for all examples, such as a counter of a loop, has no axis of
# examples under `jax.vmap`. The cotangent of a use of it would be a sum over the batch.
@jax.custom_batching.custom_vmap
def _of_example(x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns x, with an axis of examples under `jax.vmap`, as `number` has."""
    del number
    return x


@_of_example.def_vmap
def _of_each_example(
    size: int, batched: list[bool], x: jax.Array, number: jax.Array
) -> tuple[jax.Array, bool]:
    del number
    return (x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))), True


def _use_with_probe(
    step: ProgramStep, function: BatchFunction, shape: tuple[int, ...], mapped: bool
) -> Callable[..., jax.Array]:
    """Returns `apply(operands, probe, own)`, the output of a use for one example.

    The derivative with respect to the data operand is that of the operation. The derivative with
    respect to the probe is the function's result for all examples that `jax.vmap` maps over.
    """

    # `jax.vmap` would map the function over examples, but it needs all of them at once. So its own
    # rule for vmap gets the whole batch, and says that the result has no axis of examples.
    @jax.custom_batching.custom_vmap
    def result(operand: jax.Array, cotangent: jax.Array, own: PyTree) -> jax.Array:
        del operand, cotangent, own
        return jnp.zeros(shape, jnp.float32)  # only for its type

    @result.def_vmap
    def batch_rule(size: int, batched: list[Any], *arrays: PyTree) -> tuple[jax.Array, bool]:
        def whole(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

        # `mapped` tells `jax.vmap` whether the result has an axis of examples.
        return function(*jax.tree.map(whole, arrays, tuple(batched))), mapped

    @jax.custom_vjp
    def apply(operands: Arrays, probe: jax.Array, own: PyTree) -> jax.Array:
        del probe, own
        (output,) = bind(step.eqn, operands)
        return output

    def forward(operands: Arrays, probe: jax.Array, own: PyTree) -> tuple[jax.Array, Any]:
        return apply(operands, probe, own), (operands, own)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, jax.Array, None]:
        operands, own = saved
        if cotangent.dtype != jnp.float16:  # which becomes float32 when it is recorded
            # Here, so that the derivative and the sum read one array.
            cotangent = within_range(cotangent)
        # A use has one operand that depends on the example. The parameter gets no gradient here,
        # because the result for the probe replaces it. Indices have none.
        operand, gradients = operands[step.data], [None] * len(operands)
        if jnp.issubdtype(operand.dtype, jnp.inexact):

            def output(operand: jax.Array) -> jax.Array:
                moved = [*operands[: step.data], operand, *operands[step.data + 1 :]]
                return bind(step.eqn, moved)[0]

            (gradients[step.data],) = jax.vjp(output, operand)[1](cotangent)
        return gradients, result(operand, cotangent, own), None

    apply.defvjp(forward, backward)
    return apply
