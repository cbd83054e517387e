"""Finds the parameters whose gradients are exactly zero for every example.

The loss does not use them, or only without a gradient, as behind `jax.lax.stop_gradient`. Or they
reach the loss only through a value minus its own mean over axes of size one. It is zero for every
example, and so is its derivative. Batch normalization computes this in a loss of one example,
unless it averages over spatial axes. Such parameters receive only noise. The result is used only in
messages. Norms, bounds and sums do not depend on it.
"""

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._gradients.ghost_clipping.trace.program import (
    Block,
    Constant,
    DerivedValue,
    PrivateValue,
    Program,
    Step,
    Value,
)
from dpoptax._gradients.ghost_clipping.trace.read_program import GradientFlow
from dpoptax._support.tree import PyTree, is_real

# The result and its derivatives are zero if any operand is.
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# The result and its derivatives are zero if the first operand is.
_LINEAR_MAPS = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "div", "neg", "reduce_sum", "reshape",
        "slice", "squeeze", "transpose",
    }
)  # fmt: skip
# These keep the order of the entries.
_RESHAPES = frozenset({"broadcast_in_dim", "copy", "reshape", "squeeze"})
_LISTED_NAMES = 8  # of parameters and places in a message


class _ZeroFinder:
    """Finds values that are zero for every example.

    Attributes:
      zeros: the values that are zero for every example.
      differences: the steps that subtract the mean of a value from the value.
    """

    def __init__(self) -> None:
        self.zeros: set[Value] = set()
        self.differences: list[Step] = []
        # Values that equal an earlier value except for axes of size one, and whether a mean was
        # taken.
        self.equal: dict[Value, tuple[Value, bool]] = {}

    def follow(self, block: Block) -> None:
        for step in block.steps:
            if step.body is None:
                self._follow_operation(step)
            elif step.scan_id is None:
                self.follow(step.body)
                self._pass_on(zip(step.body.results, step.outputs, strict=True))
            else:
                self._follow_scan(step, step.body)

    def _follow_operation(self, step: Step) -> None:
        name, operands = step.eqn.primitive.name, step.operands
        zero = [v in self.zeros for v in operands]
        if name == "sub" and self._is_centered(*operands):
            self.differences.append(step)
            self.zeros.update(step.outputs)
        elif (name in _PRODUCTS and any(zero)) or (name in _LINEAR_MAPS and zero[0]):
            self.zeros.update(step.outputs)
        elif (source := self._source(step)) is not None:
            first, averaged = self.equal.get(source, (source, False))
            self.equal[step.outputs[0]] = first, averaged or name == "reduce_sum"

    def _follow_scan(self, step: Step, body: Block) -> None:
        constants, first_slice = step.carry.start, step.carry.stop
        for i, inside in enumerate(body.inputs):
            outside = step.operands[i]
            if i < constants:
                self._pass_on([(outside, inside)])
            elif i >= first_slice and outside in self.zeros:
                self.zeros.add(inside)
        self.follow(body)
        carried = first_slice - constants
        stacked = zip(body.results[carried:], step.outputs[carried:], strict=True)
        self.zeros.update(out for inside, out in stacked if inside in self.zeros)

    def _pass_on(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        for source, target in pairs:
            if isinstance(source, PrivateValue):
                self.equal[target] = self.equal.get(source, (source, False))
            if source in self.zeros:
                self.zeros.add(target)

    def _is_centered(self, value: Value, mean: Value) -> bool:
        if not isinstance(value, PrivateValue) or not isinstance(mean, PrivateValue):
            return False
        (a, _), (b, averaged) = (self.equal.get(v, (v, False)) for v in (value, mean))
        return a is b and averaged and is_real(value.aval.dtype)

    def _source(self, step: Step) -> PrivateValue | None:
        """Returns the operand, if any, that equals the output except for axes of size one."""
        eqn, operands = step.eqn, step.operands
        private = [v for v in operands if isinstance(v, PrivateValue)]
        if len(private) != 1 or len(step.outputs) != 1:
            return None
        (source,), (out,), name = private, step.outputs, eqn.primitive.name
        shape = source.aval.shape
        if name in ("mul", "div"):
            other = operands[1] if source is operands[0] else operands[0]
            # A mean over one entry divides by 1.
            one = _is_one(other) and (name == "mul" or source is operands[0])
            return source if one and out.aval.shape == shape else None
        if len(operands) != 1:
            return None
        if name == "convert_element_type":
            first, _ = self.equal.get(source, (source, False))
            same = _can_represent(out.aval.dtype, first.aval.dtype)
        elif name == "reduce_sum":
            same = all(shape[i] == 1 for i in eqn.params["axes"])
        else:
            same = name in _RESHAPES and _strip_ones(shape) == _strip_ones(out.aval.shape)
        return source if same else None


def _strip_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a shape other than 1."""
    return tuple(n for n in shape if n != 1)


def _is_one(value: Value) -> bool:
    if not isinstance(value, DerivedValue) or not isinstance(value.origin, Constant):
        return False
    number = value.origin.value
    return isinstance(number, (int, float, np.generic, np.ndarray)) and bool(np.all(number == 1))


def _can_represent(wide: np.dtype, narrow: np.dtype) -> bool:
    """Returns whether one float type represents every number of another."""
    if not is_real(wide) or not is_real(narrow):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.nexp >= b.nexp


class Vanishing(NamedTuple):
    """Holds the parameters whose gradients are zero for every example.

    Attributes:
      unused: the parameters from which no gradient flows to the loss.
      centered: the parameters that reach the loss only through values that are zero.
      zeros: descriptions of these values.
    """

    unused: frozenset[int]
    centered: frozenset[int] = frozenset()
    zeros: tuple[str, ...] = ()

    @property
    def leaves(self) -> frozenset[int]:
        """Returns all of these parameters."""
        return self.unused | self.centered


def find_vanishing(program: Program) -> Vanishing:
    """Finds the parameters whose gradients are zero for every example, whatever its data."""
    block, found = program.block, _ZeroFinder()
    found.follow(block)
    if not found.zeros:
        return Vanishing(program.unused)
    flow = GradientFlow()  # according to the operations
    flow.follow(block, block.results[:1])
    zeros = found.zeros & flow.values
    rest = GradientFlow(zeros)
    rest.follow(block, block.results[:1])
    leaves = _reached_parameters(block, flow) - _reached_parameters(block, rest)
    places = (_describe_step(step) for step in found.differences if step.outputs[0] in zeros)
    return Vanishing(
        program.unused, frozenset(leaves), tuple(dict.fromkeys(places)) if leaves else ()
    )


def _describe_step(step: Step) -> str:
    shape, stack = step.outputs[0].aval.shape, str(step.eqn.source_info.name_stack)
    return f"of shape {tuple(shape)}" + (f" in {stack}" if stack else "")


def _reached_parameters(block: Block, flow: GradientFlow) -> set[int]:
    """Returns the parameters that operations with a gradient read."""
    found: set[int] = set()
    for step in block.steps:
        if step not in flow.steps:
            continue
        read = step.operands
        if step.body is not None:
            found |= _reached_parameters(step.body, flow)
            first = () if step.scan_id is None else step.operands[step.carry]
            read = (*first, *step.body.results)
        found = found.union(*(v.leaves for v in read if isinstance(v, DerivedValue)))
    return found


def describe_vanishing(found: Vanishing, params: PyTree) -> str:
    """Describes the results of `find_vanishing` and the remedies. Empty if no gradient is zero."""
    if not any(found):
        return ""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]

    def names(leaves: frozenset[int]) -> str:
        return _join_names(paths[leaf] or "the parameter" for leaf in sorted(leaves))

    texts = []
    if found.unused:
        texts.append(
            "These parameters get gradients of exactly zero and receive only noise, because "
            "`loss_fn` does not use them, or uses them only without a gradient, as behind "
            f"`jax.lax.stop_gradient`: {names(found.unused)}. Remove them from the parameters. If "
            "`loss_fn` needs them, pass them to `dpoptax.training.fit` as `frozen`, or make them "
            "an argument of the jitted step and call `dpoptax.clipped_grad` inside it with a loss "
            "that closes over them."
        )
    if found.centered:
        texts.append(
            "`loss_fn` subtracts from a value its own mean over axes of size one, which is zero "
            f"for every example ({_join_names(found.zeros)}). These parameters get gradients of "
            f"exactly zero and receive only noise: {names(found.centered)}. Batch normalization "
            "does this, since `loss_fn` sees one example at a time. Use GroupNorm or LayerNorm, or "
            "freeze the running averages."
        )
    return " ".join(texts)


def _join_names(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _LISTED_NAMES} more" if len(shown) > _LISTED_NAMES else ""
    return ", ".join(shown[:_LISTED_NAMES]) + more


def warn_of_vanishing(program: Program, params: PyTree) -> None:
    """Warns of parameters whose gradients are exactly zero."""
    if text := describe_vanishing(find_vanishing(program), params):
        warnings.warn(f"{text} `dpoptax.explain` lists them.", stacklevel=2)
