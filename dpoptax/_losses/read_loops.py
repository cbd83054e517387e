"""Reads `jax.lax.scan` and `jax.checkpoint`, and gives rules for uses inside scans."""

import dataclasses
import math
from collections.abc import Callable

import jax

from dpoptax._losses.program import (
    Block,
    DerivedValue,
    PrivateValue,
    ScanSlices,
    Step,
    Value,
)
from dpoptax._losses.rules import FactorLayout, Rule
from dpoptax._support.jaxprs import closed_program, type_of
from dpoptax._support.tree import PyTree


def read_body(step: Step, read: Callable[..., Block]) -> tuple[Value, ...]:
    """Reads the body of a step with `read`, and returns the results of the step."""
    eqn, operands = step.eqn, step.operands
    inner, consts = closed_program(eqn.params)
    varies = any(v.varies for v in operands)
    private = [PrivateValue(type_of(v), varies) for v in eqn.outvars]
    if step.scan_id is not None:
        loops = (*step.loops, (step.scan_id, eqn.params["length"]))
        inputs = [_scan_input(step, i, type_of(v)) for i, v in enumerate(inner.invars)]
        step.body = read(inner, consts, inputs, loops)
        return tuple(private)
    step.body = read(inner, consts, operands, step.loops)
    return tuple(
        inside if isinstance(inside, DerivedValue) else out
        for inside, out in zip(step.body.results, private, strict=True)
    )


def _scan_input(step: Step, i: int, aval: jax.core.ShapedArray) -> Value:
    """Returns an input of a scan's body, for operand i of the scan."""
    outer, carry = step.operands[i], step.carry
    # A carry may depend on the example after the first step, so it is always private.
    if carry.start <= i < carry.stop:
        return PrivateValue(aval)
    if isinstance(outer, PrivateValue):
        return PrivateValue(aval, outer.varies)
    if i < carry.start:
        return outer
    assert step.scan_id is not None
    scans = (*outer.scans, step.scan_id)
    return dataclasses.replace(outer, aval=aval, scans=scans, origin=ScanSlices(outer))


@dataclasses.dataclass(frozen=True)
class Repeated(Rule):
    """Gives the factors of a use inside scans, for all steps together.

    Steps of scans become positions L. If the value has a slice for each step, they become groups K.

    Attributes:
      rule: the rule for one step.
      loops: (length, stacked) of each enclosing scan.
    """

    rule: Rule
    loops: tuple[tuple[int, bool], ...]
    layout: FactorLayout
    positions: int
    name: str
    reads_data: bool
    is_lookup: bool

    @classmethod
    def build(cls, rule: Rule, loops: tuple[tuple[int, bool], ...]) -> "Repeated":
        layout = rule.layout
        for length, stacked in reversed(loops):
            layout = layout.stacked(length) if stacked else layout
        positions = rule.positions * math.prod(n for n, stacked in loops if not stacked)
        kind = rule.name, rule.reads_data, rule.is_lookup
        return cls(rule, loops, layout, positions, *kind)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, columns = self._map_steps(self.rule.factors)(operand, cotangent)
        return self._fold_steps(rows), self._fold_steps(columns)

    def row_parts(
        self, operand: jax.Array, cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        parts = self._map_steps(self.rule.row_parts)(operand, cotangent)
        return [(self._fold_steps(rows), self._fold_steps(columns)) for rows, columns in parts]

    def _map_steps(self, factors: Callable[..., PyTree]) -> Callable[..., PyTree]:
        for _ in self.loops:
            factors = jax.vmap(factors)
        return factors

    def _fold_steps(self, factor: jax.Array) -> jax.Array:
        lead = len(self.loops)
        stacked = [i for i, (_, s) in enumerate(self.loops) if s]
        shared = [i for i, (_, s) in enumerate(self.loops) if not s]
        # Scans over stacked parameters give groups and all others positions, outermost first.
        order = (*stacked, lead, *shared, *range(lead + 1, factor.ndim))
        groups, _, _ = self.layout.sizes
        trailing = factor.shape[lead + 2 :]
        return factor.transpose(order).reshape(groups, self.positions, *trailing)
