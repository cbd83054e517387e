"""Forms per-example gradients that are cheaper to form, or that have no factors."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._gradients.ghost_clipping.cost_model import COSTS
from dpoptax._gradients.ghost_clipping.norms import factor_products
from dpoptax._gradients.ghost_clipping.norms.factor_products import Segment
from dpoptax._gradients.ghost_clipping.passes.interpreter import ParameterEvaluator
from dpoptax._gradients.ghost_clipping.passes.run_passes import (
    Passes,
    WeightedPair,
    pairs_by_point,
    weighted_pairs,
)
from dpoptax._gradients.ghost_clipping.plan import Plan
from dpoptax._gradients.ghost_clipping.trace.program import Program, Use
from dpoptax._gradients.points import weigh
from dpoptax._support.tree import widen
from dpoptax._support.xla import opaque_integers, round_to_dtype


def form_gradients(program: Program, plan: Plan, passes: Passes) -> dict[int, jax.Array]:
    """Returns the per-example gradients (B, ...) of the formed parameters.

    They are in float32. Gradients from factors of one use are rounded to `passes.factor_dtype` like
    the factors, since they may be large.
    """
    total: dict[int, jax.Array] = {}

    def add(leaf: int, value: jax.Array) -> None:
        total[leaf] = widen(total[leaf]) + widen(value) if leaf in total else value

    weights = passes.points.weights
    for leaf in program.opaque:
        for at_point, weight in zip(passes.at_points, weights, strict=True):
            add(leaf, widen(weigh(at_point.gradients[leaf], weight)))
        if passes.tangent is not None:
            add(leaf, widen(passes.tangent.gradients[leaf]))
    for use in plan.formed_uses:
        view = use.value.view
        if view is not None:
            pairs = weighted_pairs(use, passes, True)
            gradient = _form_use(use, pairs, passes.factor_dtype, rounded=True)
            shape = tuple(program.parameters[view.leaf].shape)
            add(view.leaf, jax.vmap(lambda g, v=view, s=shape: v.scatter(g, s))(gradient))
        else:
            for leaf, gradient in _pull_back(use, passes).items():
                add(leaf, gradient)
    return total


def bundle_gradients(
    formed: dict[int, jax.Array], groups: list[int]
) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
    """Joins small formed gradients of one clip group into one array (B, entries).

    The others keep their shapes, (B, …).
    """
    bundles: dict[tuple[int, int | None], list[int]] = {}
    for leaf, gradient in formed.items():
        small = math.prod(gradient.shape[1:]) <= COSTS.bundled_entries
        bundles.setdefault((groups[leaf], None if small else leaf), []).append(leaf)

    def join(bundle: list[int]) -> jax.Array:
        gradients = [formed[leaf] for leaf in bundle]
        if len(gradients) == 1:
            return gradients[0]  # on TPU, which tiles the last two axes, a reshape is a copy
        flat = [g.reshape(g.shape[0], math.prod(g.shape[1:])) for g in gradients]
        return jnp.concatenate(flat, axis=1)

    return [join(bundle) for bundle in bundles.values()], tuple(map(tuple, bundles.values()))


def _form_use(
    use: Use,
    pairs: Sequence[WeightedPair],
    dtype: DTypeLike | None,
    *,
    rounded: bool = False,
) -> jax.Array:
    """Forms per-example gradients of a used value, (B, ...).

    The factors are rounded to `dtype`, and the gradients as well if `rounded`. Otherwise these are
    in float32.
    """
    groups, rows, columns = use.layout.sizes

    def form(row_parts: Callable[..., list[tuple[jax.Array, jax.Array]]]) -> jax.Array:
        by_pair = [
            [
                Segment(*part).rounded(dtype)
                for part in jax.vmap(row_parts)(operand, weigh(cotangent, weight))
            ]
            for operand, cotangent, weight in pairs
        ]
        sizes = groups, rows // len(by_pair[0]), columns
        parts = [
            factor_products.multiply_factors(list(segments), sizes)
            for segments in zip(*by_pair, strict=True)
        ]
        if rounded and dtype is not None:
            parts = [round_to_dtype(part, dtype) for part in parts]
        return jnp.concatenate(parts, axis=2)

    gradients: jax.Array = lax.platform_dependent(
        tpu=lambda: form(use.row_parts),
        default=lambda: form(lambda operand, cotangent: [use.factors(operand, cotangent)]),
    )
    stack = tuple(n for n, stacked in use.loops if stacked)
    return jax.vmap(lambda g: use.layout.fold(g, (*stack, *use.value.aval.shape)))(gradients)


def _pull_back(use: Use, passes: Passes) -> dict[int, jax.Array]:
    """Returns gradients of the parameters behind a used value, (B, ...) each."""
    leaves, dtype = sorted(use.value.leaves), passes.factor_dtype

    def pull(chosen: list[jax.Array], gradient: jax.Array, j: int) -> list[jax.Array]:
        def value(chosen: list[jax.Array]) -> jax.Array:
            every = list(passes.leaves[j])
            for leaf, x in zip(leaves, chosen, strict=True):
                every[leaf] = x
            return ParameterEvaluator(every)(use.value)

        out, transpose = jax.vjp(value, chosen)
        return jax.vmap(lambda g: transpose(g.astype(out.dtype))[0])(gradient)

    total: dict[int, jax.Array] = {}
    for j, (operand, cotangent, weight) in enumerate(pairs_by_point(use, passes)):
        chosen = [passes.leaves[j][leaf] for leaf in leaves]
        gradient = _form_use(use, [(operand, cotangent, 1.0)], dtype)
        if j == 0 and passes.tangent is not None:
            tangent = passes.tangent
            direction = jax.tree.leaves(passes.points.tangent)
            pairs = [(operand, tangent.cotangents[use.index], 1.0)]
            if not jnp.issubdtype(operand.dtype, jnp.integer):
                pairs.append((tangent.operands[use.index], cotangent, 1.0))
            # The pulled-back gradient depends on the parameters and on `gradient`, and both change
            # along the tangent.
            parts, changes = jax.jvp(
                lambda c, g: pull(c, g, 0),
                (chosen, gradient),
                ([direction[leaf] for leaf in leaves], _form_use(use, pairs, dtype)),
            )
        else:
            parts, changes = pull(chosen, gradient, j), None
        for i, leaf in enumerate(leaves):
            part = widen(weigh(parts[i], weight))
            part = part if changes is None else part + widen(changes[i])
            total[leaf] = total[leaf] + part if leaf in total else part
    return total


def unbundle(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits a vector into arrays with the shapes of `like`. One array may be in its shape."""
    if len(like) == 1:
        return [vector.reshape(like[0].shape)]
    ends = np.cumsum([x.size for x in like])
    # With constant indices, XLA would compile a kernel for each slice, which is slow.
    starts = opaque_integers([int(end) - x.size for end, x in zip(ends, like, strict=True)])
    part = partial(lax.dynamic_slice, allow_negative_indices=False)
    return [
        part(vector, (start,), (x.size,)).reshape(x.shape)
        for start, x in zip(starts, like, strict=True)
    ]
