"""Finds values that have no gradient, or are zero, for every example because of their shapes.

A value minus its own mean over axes of size one is zero. A softmax over one entry is 1, and the
logsumexp of one entry minus this entry is zero. For each value, the finder records an earlier value
that it equals, or follows, except for axes of size one. The result is used only in messages.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from dpoptax._losses.program import (
    Block,
    Constant,
    DerivedValue,
    Result,
    Step,
    Value,
)
from dpoptax._support.jaxprs import ZERO_DERIVATIVE_PRIMITIVES, carries_gradient
from dpoptax._support.tree import is_real

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
_RESHAPES = frozenset({"broadcast_in_dim", "copy", "dynamic_slice", "gather", "reshape", "squeeze"})
# Over axes of size one, these return their operand.
_REDUCTIONS = frozenset(
    {
        "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce_max", "reduce_min",
        "reduce_prod", "reduce_sum", "rev", "sort",
    }
)  # fmt: skip
_COMPARISONS = frozenset({"eq", "ge", "le"})


class Change(NamedTuple):
    """Describes how a value changes with an earlier one, except for axes of size one.

    Its derivative is `sign` times that of `source`. If it is `exponential`, this holds for its
    logarithm.
    """

    source: Value
    sign: int = 1
    exponential: bool = False


class ConstantFinder:
    """Finds values that have no gradient, or are zero, for every example.

    Attributes:
      zeros: the values that are zero for every example.
      constants: the values without a gradient, because two that change equally were compared.
      comparisons: the steps that compare them.
    """

    def __init__(self) -> None:
        self.zeros: set[Value] = set()
        self.constants: set[Value] = set()
        self.comparisons: list[Step] = []
        self._equal: dict[Value, Value] = {}
        self._changes: dict[Value, Change] = {}
        self._true: set[Value] = set()
        self._still: set[Value] = set()  # values without a gradient, except derived ones

    def follow(self, block: Block) -> None:
        for step in block.steps:
            if step.body is None:
                self._follow_operation(step)
            elif step.scan_id is None:
                self.follow(step.body)
                self._pass_on(zip(step.body.results, step.outputs, strict=True))
            else:
                self._follow_scan(step, step.body)

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
            self._equate(target, source)
            self._changes[target] = self._change(source)
            if source in self._still:
                self._still.add(target)
            if source in self.zeros:
                self.zeros.add(target)

    def _follow_operation(self, step: Step) -> None:
        name, operands = step.eqn.primitive.name, step.operands
        zero = [v in self.zeros for v in operands]
        if name in _COMPARISONS and self._root(operands[0]) is self._root(operands[1]):
            self._true.update(step.outputs)
        if (name in _PRODUCTS and any(zero)) or (name in _LINEAR_MAPS and zero[0]):
            self.zeros.update(step.outputs)
        for source, target in self._copies(step):
            self._equate(target, source)
        moving = [v for v in operands if self._moves(v)]
        if not moving or name in ZERO_DERIVATIVE_PRIMITIVES:
            self._still.update(step.outputs)
        elif self._compares_equal(step, moving):
            self.comparisons.append(step)
            self.constants.update(step.outputs)
            self._still.update(step.outputs)
            if name == "sub" and self._root(operands[0]) is self._root(operands[1]):
                self.zeros.update(step.outputs)
        elif len(moving) == 1 and (change := self._follow_change(step, moving[0])) is not None:
            self._changes[step.outputs[0]] = change

    def _moves(self, value: Value) -> bool:
        """Returns whether a gradient may flow to parameters from a value."""
        if isinstance(value, DerivedValue):
            return bool(value.leaves)
        return value.varies and carries_gradient(value.aval) and value not in self._still

    def _equate(self, value: Value, source: Value) -> None:
        self._equal[value] = self._root(source)

    def _root(self, value: Value) -> Value:
        return self._equal.get(value, value)

    def _change(self, value: Value) -> Change:
        root = self._root(value)
        return self._changes.get(value) or self._changes.get(root) or Change(root)

    def _compares_equal(self, step: Step, moving: list[Value]) -> bool:
        """Returns whether a step takes the difference, or ratio, of values that change equally."""
        if len(moving) != 2 or not all(is_real(v.aval.dtype) for v in moving):
            return False
        (a, b), name = map(self._change, moving), step.eqn.primitive.name
        opposite = a.sign + b.sign == 0 if name == "add" else a.sign == b.sign
        kinds = {"add": (False, False), "sub": (False, False), "div": (True, True)}
        return (
            a.source is b.source and opposite and (a.exponential, b.exponential) == kinds.get(name)
        )

    def _follow_change(self, step: Step, moving: Value) -> Change | None:
        """Returns how the output changes with the only operand that has a gradient."""
        name, change = step.eqn.primitive.name, self._change(moving)
        first = step.operands[0] is moving
        turned = change._replace(sign=-change.sign)
        if any(source is moving for source, _ in self._copies(step)):
            return change
        if name == "exp" and not change.exponential:
            return change._replace(exponential=True)
        if name == "log" and change.exponential:
            return change._replace(exponential=False)
        if name in ("add", "sub") and not change.exponential:
            return change if first or name == "add" else turned
        if name in ("mul", "div") and change.exponential:
            return change if first or name == "mul" else turned
        if name == "neg":
            return change if change.exponential else turned
        return change if name == "abs" and change.exponential else None

    def _copies(self, step: Step) -> list[tuple[Value, Value]]:
        """Returns operands and the outputs that equal them except for axes of size one."""
        if step.eqn.primitive.name == "sort":
            one = step.operands[0].aval.shape[step.eqn.params["dimension"]] == 1
            return list(zip(step.operands, step.outputs, strict=True)) if one else []
        if not step.operands or len(step.outputs) != 1:
            return []
        source = self._copied(step)
        return [] if source is None else [(source, step.outputs[0])]

    def _copied(self, step: Step) -> Value | None:
        """Returns the operand, if any, that the only output equals."""
        name, operands, params = step.eqn.primitive.name, step.operands, step.eqn.params
        source, out = operands[0], step.outputs[0]
        shape, same = source.aval.shape, False
        if name in ("mul", "div"):
            # A mean over one entry divides by 1.
            if name == "mul" and _is_one(operands[0]):
                source = operands[1]
            elif not _is_one(operands[1]):
                return None
            same = source.aval.shape == out.aval.shape
        elif name == "select_n" and len(operands) == 3:
            # An entry that is masked with -inf makes the loss infinite if it is the only one.
            certain = self._root(operands[0]) in self._true or _number(operands[0]) == 1
            return operands[2] if certain or _number(operands[1]) == -jnp.inf else None
        elif name == "convert_element_type":
            same = _can_represent(out.aval.dtype, self._root(source).aval.dtype)
        elif name in _REDUCTIONS:
            axes = params.get("axes", params.get("dimensions", (params.get("axis"),)))
            same = all(shape[i] == 1 for i in axes)
        elif name in _RESHAPES:
            sizes = params.get("slice_sizes", shape)
            whole = tuple(sizes) == shape
            same = whole and _strip_ones(shape) == _strip_ones(out.aval.shape)
        return source if same else None


def _strip_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes of a shape other than 1."""
    return tuple(n for n in shape if n != 1)


def _is_one(value: Value) -> bool:
    return _number(value) == 1


def _number(value: Value) -> float | None:
    """Returns the number that all entries of a constant have, if it is one."""
    if not isinstance(value, DerivedValue):
        return None
    if isinstance(value.origin, Result):
        names = ("broadcast_in_dim", "convert_element_type", "reshape")
        known = value.origin.step.eqn.primitive.name in names
        return _number(value.origin.operands[0]) if known else None
    if not isinstance(value.origin, Constant):
        return None
    number = value.origin.value
    if not isinstance(number, (int, float, np.generic, np.ndarray)) or not np.size(number):
        return None
    first = np.ravel(number)[0]
    return float(first) if _is_number(first) and bool(np.all(number == first)) else None


def _is_number(value: np.generic) -> bool:
    """Returns whether a host scalar is a real number or a bool."""
    return bool(np.issubdtype(value.dtype, np.floating) or value.dtype.kind in "biu")


def _can_represent(wide: np.dtype, narrow: np.dtype) -> bool:
    """Returns whether one float type represents every number of another."""
    if not is_real(wide) or not is_real(narrow):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.nexp >= b.nexp
