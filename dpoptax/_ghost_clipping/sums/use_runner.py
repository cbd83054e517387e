"""Runs a loss so that derivatives by probes are results of the batch, computed use by use."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    Environment,
    Interpreter,
    make_environment,
    opaque_zeros,
)
from dpoptax._ghost_clipping.trace.program import Program, Step, Use
from dpoptax._jaxprs import bind
from dpoptax._tree import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class BatchFunction:
    """Describes what to compute from the operands and cotangents of a use.

    Attributes:
      function: `function(operand, cotangent, own, shared)`. The first three are arrays (B, …).
      results: the types of its results, for one step of the scans. Results with a row for each
        example are without this axis.
      mapped: for each result, whether it has a row for each example.
    """

    function: Callable[..., PyTree]
    results: tuple[jax.ShapeDtypeStruct, ...]
    mapped: tuple[bool, ...]


class UseRunner(Interpreter):
    """Runs a loss whose derivative by a probe is the result of a `BatchFunction`.

    Where automatic differentiation would sum the gradients of all examples, this function is
    called. A scan stacks its results as it would stack gradients, and `jax.checkpoint` computes its
    operands again.

    `by_use` holds (probes, own): zeros in the shape of the results, with the steps of scans as
    leading axes, and the use's own inputs of the function. `shared` are the inputs of all uses.
    """

    def __init__(
        self,
        by_use: ByIndex,
        known: Environment,
        functions: dict[int, BatchFunction],
        shared: jax.Array,
    ) -> None:
        super().__init__(by_use, known)
        self.functions = functions
        self.shared = shared

    def inner(self, by_use: ByIndex, known: Environment) -> "UseRunner":
        return UseRunner(by_use, known, self.functions, self.shared)

    def use(self, step: Step, use: Use, operands: Arrays) -> jax.Array:
        apply = _use_with_probe(step, self.functions[use.index])
        return apply(operands, *self.by_use[use.index], self.shared)


def run_uses(
    program: Program,
    params: Arrays,
    inputs: Arrays,
    functions: dict[int, BatchFunction],
    *,
    own: ByIndex,
    shared: jax.Array,
    axes: tuple[str, ...] | None,
) -> tuple[dict[int, tuple[jax.Array, ...]], ByIndex, Arrays]:
    """Runs a batch forward and backward with a `BatchFunction` for each use.

    Args:
      program: the loss of one example.
      params: the parameters.
      inputs: the examples, arrays (B, …).
      functions: what to compute, by use.
      own: the inputs of each function, (B, steps of its scans, …).
      shared: an input of all functions: (B,), or a scalar.
      axes: the mesh axes that the examples are sharded over.

    Returns:
      The results by use, with the steps of scans as leading axes (behind B for results with rows
      for examples); the gradients by opaque parameters, (B, …); and the outputs of the loss.
    """
    examples = inputs[0].shape[0]

    def example(
        by_use: ByIndex, opaque: ByIndex, own: ByIndex, inputs: Arrays, shared: jax.Array
    ) -> Arrays:
        known = make_environment(program, params, opaque)
        both = {index: (by_use[index], own[index]) for index in by_use}
        return UseRunner(both, known, functions, shared).run(program.block, inputs)

    mapped = {index: tuple(0 if m else None for m in f.mapped) for index, f in functions.items()}
    every = jax.vmap(example, (mapped, 0, 0, 0, 0 if shared.ndim else None), spmd_axis_name=axes)

    def total(by_use: ByIndex, opaque: ByIndex) -> tuple[jax.Array, Arrays]:
        outputs = every(by_use, opaque, own, inputs, shared)
        return outputs[0].sum(), outputs

    def probe(use: Use, kind: jax.ShapeDtypeStruct, is_mapped: bool) -> jax.Array:
        rows = (examples,) if is_mapped else ()
        return jnp.zeros((*rows, *(n for n, _ in use.loops), *kind.shape), kind.dtype)

    probes = {
        use.index: tuple(
            probe(use, *each)
            for each in zip(functions[use.index].results, functions[use.index].mapped, strict=True)
        )
        for use in program.uses
    }
    (found, gradients), outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(
        probes, opaque_zeros(program, examples)
    )
    return found, gradients, outputs


def _use_with_probe(step: Step, batch: BatchFunction) -> Callable[..., jax.Array]:
    """Returns `apply(operands, probes, own, shared)`: the output of a use of one example.

    Its derivative by the data operand is that of the operation. By the probes, it is the result of
    the function of all examples that `jax.vmap` maps it over.
    """

    @jax.custom_batching.custom_vmap
    def results(operand: jax.Array, cotangent: jax.Array, own: PyTree, shared: PyTree) -> PyTree:
        del operand, cotangent, own, shared
        return tuple(jnp.zeros(kind.shape, kind.dtype) for kind in batch.results)  # only a type

    @results.def_vmap
    def batch_rule(
        size: int,
        mapped: list[Any],
        operand: jax.Array,
        cotangent: jax.Array,
        own: PyTree,
        shared: PyTree,
    ) -> tuple[PyTree, PyTree]:
        def whole(x: jax.Array, is_mapped: bool) -> jax.Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        each = jax.tree.map(whole, (operand, cotangent, own), tuple(mapped[:3]))
        return batch.function(*each, shared), batch.mapped

    @jax.custom_vjp
    def apply(operands: Arrays, probes: PyTree, own: PyTree, shared: PyTree) -> jax.Array:
        del probes, own, shared
        (output,) = bind(step.eqn, operands)
        return output

    def forward(
        operands: Arrays, probes: PyTree, own: PyTree, shared: PyTree
    ) -> tuple[jax.Array, Any]:
        return apply(operands, probes, own, shared), (operands, own, shared)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, PyTree, None, None]:
        operands, own, shared = saved
        operand, gradients = operands[step.data], [None] * len(operands)
        if jnp.issubdtype(operand.dtype, jnp.inexact):

            def output(operand: jax.Array) -> jax.Array:
                moved = [*operands[: step.data], operand, *operands[step.data + 1 :]]
                return bind(step.eqn, moved)[0]

            (gradients[step.data],) = jax.vjp(output, operand)[1](cotangent)
        return gradients, results(operand, cotangent, own, shared), None, None

    apply.defvjp(forward, backward)
    return apply
