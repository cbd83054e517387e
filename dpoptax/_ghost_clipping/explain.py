"""Explains, before a run, how each parameter's norms and clipped sum are computed."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax

from dpoptax._ghost_clipping.make_plan import make_plan
from dpoptax._ghost_clipping.plan import Plan, Product, kept_share
from dpoptax._losses.derived_views import find_view
from dpoptax._losses.microbatch_rule import microbatch_rule
from dpoptax._losses.read_program import read_program
from dpoptax._losses.trace_loss import trace_loss
from dpoptax._losses.traced_program import Program, Use
from dpoptax._losses.zero_gradients import describe_constant, describe_unused, find_zero_gradients
from dpoptax._random.keys import check_key
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import device_of

_METHOD_TEXTS = {
    "outer": "product of two norms",
    "gram": "inner products",
    "form": "formed, then summed again",
}
# For these, the gradient of a parameter is at most as large as a part of the output.
_ELEMENTWISE = {"add", "sub", "mul", "div", "concatenate"}
# Gradients are named if rounding may leave less than this share of the clipping bound.
_SHORTENED = 0.95
_HEADER = ("parameter", "shape", "uses", "norm by", "madds/example", "why")


@dataclasses.dataclass(frozen=True)
class ParameterExplanation:
    """Describes how one parameter is treated.

    Attributes:
      parameter: its path in the tree.
      shape: its shape.
      uses: the operations that combine it with data.
      rule: how the norm of its per-example gradient is computed.
      cost: approximate multiply-adds per example for norm and sum.
      formed: whether memory holds a gradient of the parameter's shape for every example.
      why: the reason for per-example gradients, empty if ghost clipping applies.
      vanishes: whether the gradient is zero, so that only noise is released: for every example, or
        for the given one at several points near the parameters.
      kept: the share of a clipped gradient that bounds of rounding leave, if its positions are
        uncorrelated. Below 0.95, the note of the `Explanation` names the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    uses: str
    rule: str
    cost: int
    formed: bool
    why: str
    vanishes: bool = False
    kept: float = 1.0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Lists how every parameter is treated, and prints as a table.

    Attributes:
      rows: one for each parameter.
      note: the reason why some gradients are exactly zero or may be shortened, and the remedy;
        otherwise empty.
      batch_size: the number of examples on a device.
      microbatch_size: how many of them `clipped_grad` computes at once by default, on JAX's default
        platform.
    """

    rows: tuple[ParameterExplanation, ...]
    note: str = ""
    batch_size: int = 1
    microbatch_size: int = 1

    @property
    def fallbacks(self) -> tuple[ParameterExplanation, ...]:
        """Returns the parameters that need per-example gradients, because no rule applies."""
        return tuple(row for row in self.rows if row.why)

    @property
    def vanishing(self) -> tuple[ParameterExplanation, ...]:
        """Returns the parameters whose gradients are zero."""
        return tuple(row for row in self.rows if row.vanishes)

    def __str__(self) -> str:
        cells = [_HEADER] + [
            (r.parameter, str(r.shape), r.uses, r.rule, f"{r.cost:,}", r.why) for r in self.rows
        ]
        size = f"{self.microbatch_size} of {self.batch_size} examples are computed at once."
        parts = [size] if self.microbatch_size < self.batch_size else []
        return "\n\n".join([format_table(cells), *parts, *filter(None, [self.note])])


def format_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Formats the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    example: PyTree,
    *,
    key: jax.Array | jax.ShapeDtypeStruct | None = None,
    has_aux: bool = False,
    batch_size: int = 64,
    num_points: int = 1,
    frozen: PyTree = None,
) -> Explanation:
    """Explains how `clipped_grad` computes each parameter's norms and sum.

    The loss is traced. Its gradient is computed for the example only if all arguments are arrays,
    to find gradients that are zero. Pass shape structs for a private example.

    Args:
      loss_fn: the loss of one example, as for `clipped_grad`.
      params: the parameters, or their shape structs.
      example: one example (no batch axis), or its shape structs.
      key: a key, for a loss that takes one.
      has_aux: whether the loss returns (loss, aux).
      batch_size: the number of examples on a device. The default micro-batch size depends on it,
        and the cheapest method for a norm on that size. For another `microbatch_size`, pass it
        here.
      num_points: the number of gradient points: 2 for DiSK, k for DP-PMLF. The cheapest method
        depends on it.
      frozen: arrays that are not trained, or their shape structs. If given, the loss gets them as
        `frozen=`, as in `training.fit`.

    Returns:
      An `Explanation`, which prints as a table. `rows` has one entry for each parameter.
      `fallbacks` lists the parameters that need per-example gradients because no rule applies.
      `vanishing` lists the parameters whose gradients are zero, and `note` gives the reason.

    Raises:
      TypeError: the loss is not a scalar, or a parameter is not a real float.
      ValueError: `num_points` is below 1.

    >>> import jax.numpy as jnp
    >>> loss_fn = lambda params, x: jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    >>> params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    >>> print(explain(loss_fn, params, jnp.ones(3)))
    parameter  shape   uses         norm by               madds/example  why
    ['b']      (2,)    add          elementwise           4
    ['w']      (3, 2)  dot_general  product of two norms  11
    """
    if key is not None and not isinstance(key, jax.ShapeDtypeStruct):
        key = check_key(key)
    if num_points < 1:
        raise ValueError(f"`num_points` must be at least 1, got {num_points}.")

    # `eval_shape` returns shapes only, so other results leave it through this list.
    found: list[tuple[frozenset[int], list[ParameterExplanation], int]] = []

    # Frozen arrays are traced as an argument, like those of a jitted step.
    def read(frozen: PyTree) -> None:
        loss = loss_fn if frozen is None else functools.partial(loss_fn, frozen=frozen)
        traced = trace_loss(loss, params, example, key, has_aux=has_aux)
        size = microbatch_rule(traced, batch_size, device_of(None).platform)
        program = read_program(traced)
        plan = make_plan(program, size, num_points)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        rows = [
            _explain_parameter(program, plan, num_points, leaf, jax.tree_util.keystr(path))
            for leaf, (path, _) in enumerate(leaves)
        ]
        found.append((program.unused, rows, size))

    def value(params: PyTree, example: PyTree, key: PyTree, frozen: PyTree) -> jax.Array:
        args = (params, example) if key is None else (params, example, key)
        out = loss_fn(*args) if frozen is None else loss_fn(*args, frozen=frozen)
        return out[0] if has_aux else out

    jax.eval_shape(read, frozen)
    ((unused, rows, size),) = found
    zeros = unused | find_zero_gradients(value, params, example, key, frozen)
    for leaf in zeros:
        rows[leaf] = dataclasses.replace(rows[leaf], rule="zero", vanishes=True)
    constant = describe_constant([rows[leaf].parameter for leaf in sorted(zeros - unused)])
    notes = filter(None, [constant, describe_unused(unused, params), _describe_shortened(rows)])
    return Explanation(tuple(rows), "\n\n".join(notes), batch_size, size)


def _describe_shortened(rows: list[ParameterExplanation]) -> str:
    """Returns a note on gradients that bounds of rounding may shorten."""
    found = [f"{row.parameter} to {row.kept:.2f}" for row in rows if row.kept < _SHORTENED]
    if not found:
        return ""
    return (
        "Bounds of rounding may shorten clipped gradients of many uncorrelated positions, down to "
        f"this share of the clipping bound: {', '.join(found)}. Shorten the examples, or form the "
        "gradients with method='vmap'."
    )


def _explain_parameter(
    program: Program, plan: Plan, points: int, leaf: int, path: str
) -> ParameterExplanation:
    shape = tuple(program.parameters[leaf].shape)
    uses = [use for use in program.uses if leaf in use.value.leaves]
    named = ", ".join([*filter(None, [_operations(uses)]), *program.opaque.get(leaf, ())])
    size = math.prod(shape)
    if leaf in plan.formed:
        # If a use does not read data, its gradient is a cotangent and therefore elementwise.
        elementwise = _is_elementwise(program, leaf) and not any(u.rule.reads_data for u in uses)
        pulled = any(find_view(use.value) is None for use in uses)
        formed = "formed and kept" + (", pulled back" if pulled else "")
        rule = "per-example gradient" if plan.formed[leaf] else formed
        rule = "elementwise" if elementwise else rule
        work = sum(math.prod(u.rule.layout.sizes) * u.rule.positions for u in uses)
        cost = 2 * size + points * work
        return ParameterExplanation(
            path, shape, named, rule, cost, True, "" if elementwise else plan.formed[leaf]
        )
    products = [p for p in plan.products if p.leaf == leaf]
    if not products:
        return ParameterExplanation(path, shape, "none", "zero", 0, False, "")
    texts, costs, kept = zip(*(_explain_product(p, points) for p in products), strict=True)
    rules, forms = ", ".join(sorted(set(texts))), any(p.method == "form" for p in products)
    return ParameterExplanation(path, shape, named, rules, sum(costs), forms, "", kept=min(kept))


def _is_elementwise(program: Program, leaf: int) -> bool:
    """Returns whether a parameter is only added to, multiplied by or joined with larger data.

    Examples are biases and scales. A bias that also meets data in `jnp.where` is not elementwise.
    """
    found = program.opaque.get(leaf, {})
    known = bool(found) and found.keys() <= _ELEMENTWISE
    return known and program.parameters[leaf].size <= min(found.values())


def _operations(uses: list[Use]) -> str:
    """Returns the names of the operations of `uses`, with their counts."""
    names = collections.Counter(use.rule.name for use in uses)
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in names.items())


def _explain_product(product: Product, points: int) -> tuple[str, int, float]:
    """Returns the method of a product, its multiply-adds, and the share that rounding leaves."""
    stacks, rows, columns = product.layout.sizes
    positions = sum(m.positions * m.segments(points) for m in product.members)
    work = positions * rows * columns
    norm = {"outer": rows + columns, "gram": positions**2 * (rows + columns), "form": work}
    text = _METHOD_TEXTS[product.method] + (", pulled back" if product.is_pulled else "")
    # Inner products with one-hot factors are exact.
    exact = all(member.use.rule.is_lookup for member in product.members)
    kept = 1.0 if exact else kept_share(product.method, positions, rows, columns)
    return text, stacks * (work + norm[product.method]), kept
