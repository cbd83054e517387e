"""Finds the parameters whose gradients are exactly zero for every example.

The loss does not use them, or only without a gradient, as behind `jax.lax.stop_gradient`. Or they
reach the loss only through values that have no gradient because of their shapes: a value minus its
own mean over axes of size one, or a softmax over one entry. Batch normalization computes the first
in a loss of one example, unless it averages over spatial axes, and a loss over a batch the second
if the batch is one example. Such parameters receive only noise. The result is used only in
messages. Norms, bounds and sums do not depend on it.
"""

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import jax

from dpoptax._losses.constant_values import ConstantFinder
from dpoptax._losses.gradient_flow import GradientFlow
from dpoptax._losses.program import Block, DerivedValue, Program, Step
from dpoptax._support.tree import PyTree

_LISTED_NAMES = 8  # of parameters and places in a message


class Vanishing(NamedTuple):
    """Holds the parameters whose gradients are zero for every example.

    Attributes:
      unused: the parameters from which no gradient flows to the loss.
      constant: the parameters that reach the loss only through values without a gradient.
      places: descriptions of these values.
    """

    unused: frozenset[int]
    constant: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()

    @property
    def leaves(self) -> frozenset[int]:
        """Returns all of these parameters."""
        return self.unused | self.constant


def find_vanishing(program: Program) -> Vanishing:
    """Finds the parameters whose gradients are zero for every example, whatever its data."""
    block, found = program.block, ConstantFinder()
    found.follow(block)
    if not found.comparisons:
        return Vanishing(program.unused)
    flow = GradientFlow()  # according to the operations
    flow.follow(block, block.results[:1])
    constant = (found.zeros | found.constants) & flow.values
    rest = GradientFlow(constant)
    rest.follow(block, block.results[:1])
    leaves = _reached_parameters(block, flow) - _reached_parameters(block, rest)
    places = (_describe_step(step) for step in found.comparisons if step.outputs[0] in constant)
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
    if found.constant:
        texts.append(
            "`loss_fn` compares a value with itself, which has no gradient for any example "
            f"({_join_names(found.places)}): it subtracts its own mean over axes of size one, or "
            "takes a softmax over one entry. These parameters get gradients of exactly zero and "
            f"receive only noise: {names(found.constant)}. `loss_fn` sees one example at a time. "
            "Batch normalization subtracts such a mean: use GroupNorm or LayerNorm, or freeze the "
            "running averages. A loss that compares the examples of a batch, such as a "
            "contrastive, Cox or ranking loss, is not a sum over examples: let each example hold "
            "the group that is compared, or compare with public or frozen values."
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
