"""Gradients by a value that is made of parameters, pulled back at several points and added up.

The chain rule has the parameters of its point: each point's gradients go back by themselves, and
outer products and terms of all of them add up. Where weights are large and cancel, or data are the
same at all points, they are written with the first point's factors and differences to these,

    Σ_j r_j ⊗ c_j = r_0 ⊗ Σ_j c_j + Σ_j (r_j − r_0) ⊗ c_j,

and terms, V_j ⊙ w_j, alike.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from dpoptax._clip import bounds
from dpoptax._ghost_clipping.norms.cotangents import NotFactoredError, Outer, Term, normalised
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.norms.pull_back import Cotangent, FixedArrays, pull_back
from dpoptax._ghost_clipping.norms.pulled_back_norms import as_products, check, with_scale
from dpoptax._ghost_clipping.trace.program import Use
from dpoptax._ghost_clipping.trace.rules import Layout
from dpoptax._tree import widen
from dpoptax._xla import materialize


@dataclasses.dataclass(frozen=True)
class Pulled:
    """How many outer products and terms gradients by a value become, pulled back to a parameter.

    Attributes:
      segments: the outer products, of all points together.
      positions: those of each.
      terms: of all points together.
    """

    segments: int
    positions: int
    terms: int


def pull_back_all(
    use: Use, leaf: int, segments: list[Segment], fixed: list[FixedArrays], *, differences: bool
) -> tuple[list[Outer], list[Term]]:
    """The gradients of a use by a parameter, from its factors at each point, weights in these.

    Args:
      use: of a value that is made of the parameter.
      leaf: the parameter.
      segments: the factors at each point.
      fixed: what is made of the parameters of each.
      differences: whether to write them with differences to the first point.

    Raises:
      NotFactoredError: gradients are not of this form.
    """
    if not use.operand_varies:
        segments = [segment._replace(rows=segments[0].rows) for segment in segments]
    shape = use.value.aval.shape
    found = [
        pull_back(use.value, leaf, Outer(segment, use.layout, shape), arrays)
        for segment, arrays in zip(segments, fixed, strict=True)
    ]
    for gradients in found:  # before scales go into the factors
        check(gradients.outers, gradients.terms)
    by_outer = list(zip(*(g.outers for g in found), strict=True))
    by_term = list(zip(*(g.terms for g in found), strict=True))
    several = len(found) > 1
    joined = several and (differences or not use.operand_varies)
    outers = [x for points in by_outer for x in (_outers_from_first(points) if joined else points)]
    joined = several and differences
    terms = [x for points in by_term for x in (_terms_from_first(points) if joined else points)]
    return as_products(Cotangent(found[0].shape, outers, terms))


def foresee(
    use: Use, parameters: Sequence[ShapedArray], points: int
) -> list[tuple[int, Layout, Pulled]]:
    """What `pull_back_all` gives by each of the parameters, with the layout of its products.

    Raises:
      NotFactoredError: it does not, by one of them.
    """
    leaves = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parameters]
    groups, *sides = use.layout.sizes
    factors = [jax.ShapeDtypeStruct((1, groups, use.positions, n), jnp.float32) for n in sides]
    found = []

    def pull(leaves: list[jax.Array], factors: list[list[jax.Array]]) -> None:
        segments = [Segment(*pair) for pair in factors]
        fixed = [FixedArrays(leaves) for _ in segments]
        for leaf in sorted(use.value.leaves):
            outers, terms = pull_back_all(use, leaf, segments, fixed, differences=False)
            positions = {x.segment.rows.shape[2] for x in outers}
            if len(positions) > 1:
                raise NotFactoredError
            pulled = Pulled(len(outers), positions.pop(), len(terms))
            found.append((leaf, outers[0].layout, pulled))

    jax.eval_shape(pull, leaves, [factors] * points)
    return found


def _outers_from_first(points: tuple[Outer, ...]) -> list[Outer]:
    """The sum of outer products as those of the first factors and of differences to these."""
    first, segments, unit = points[0], [x.segment for x in points], jnp.zeros((), jnp.int32)
    if first.scale is not None:
        scales = [normalised(x.cut(x.scale)) for x in points if x.scale is not None]
        unit = functools.reduce(jnp.maximum, [exponent for _, exponent in scales])
        segments = [
            with_scale(segment, bounds.ldexp(y, exponent - unit))
            for segment, (y, exponent) in zip(segments, scales, strict=True)
        ]
    rows, columns = zip(*segments, strict=True)
    found = [Segment(rows[0], functools.reduce(operator.add, columns))]
    if any(r is not rows[0] for r in rows):
        start = widen(rows[0])
        found += [Segment(r - start, c) for r, c in segments[1:]]
    scale = jnp.broadcast_to(bounds.power(unit), (1,) * len(first.shape))
    # Stored: sums of products may be rounded in one of several ways.
    return [Outer(x, first.layout, first.shape, scale, mixed=True) for x in materialize(found)]


def _terms_from_first(points: tuple[Term, ...]) -> list[Term]:
    """The sum of terms as one of the first basis and those of differences to it."""
    first = points[0]
    found = [Term(first.basis, functools.reduce(operator.add, [t.weights for t in points]))]
    if first.basis is not None:
        others = ((t.basis, t.weights) for t in points[1:] if t.basis is not None)
        found += [Term(materialize(basis - first.basis), weights) for basis, weights in others]
    return found
