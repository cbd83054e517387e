"""Convolutions as XLA's fast kernels on CPU take them, and without groups of the batch.

These know one order of axes, channels last. XLA writes the convolutions of a program in it, but
not those inside of a loop: a gradient's, whose axes are in another order, take fifty times as long
there. So they are written in it before XLA sees them; on other platforms than CPU they stay.

The gradient by the kernel of a grouped convolution has groups of the batch, and `jax.vmap` makes
groups of examples of them. XLA computes each group with all others times zero, and what is not
finite in one example, NaN in all: without it they would not be. So they are written as groups of
features, which it keeps apart, on all platforms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from dpoptax._bookkeeping.deriving import bind, inside
from dpoptax._trees import PyTree


def channels_last(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, which computes the same with the convolutions of loops as fast as those outside."""
    traced = jax.jit(fun)

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args)
        if not _any_wants_rewriting(closed.jaxpr):
            return traced(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], inputs: Sequence[jax.Array]
) -> list[jax.Array]:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if _wants_rewriting(eqn):
            outputs: Sequence[jax.Array] = [_convolve(eqn, *operands)]
        else:
            outputs = bind(_rewritten(eqn), operands)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _convolve(eqn: JaxprEqn, images: jax.Array, kernels: jax.Array) -> jax.Array:
    given = eqn.params["dimension_numbers"]
    last = _channels_last(images.ndim)
    params = dict(eqn.params)
    if (groups := params["batch_group_count"]) > 1:
        images = _as_features(images, groups, *given.lhs_spec[:2])
        params |= {"batch_group_count": 1, "feature_group_count": groups}

    def in_order(images: jax.Array, kernels: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated_p.bind(
            _moved(images, given.lhs_spec, last.lhs_spec),
            _moved(kernels, given.rhs_spec, last.rhs_spec),
            **{**params, "dimension_numbers": last},
        )
        return _moved(out, last.out_spec, given.out_spec)

    def as_given(images: jax.Array, kernels: jax.Array) -> jax.Array:
        return lax.conv_general_dilated_p.bind(images, kernels, **params)

    return lax.platform_dependent(images, kernels, cpu=in_order, default=as_given)


def _as_features(images: jax.Array, groups: int, batch: int, features: int) -> jax.Array:
    """Images with the groups of their batch axis in the axis of features, one after the other."""
    shape = images.shape
    split = images.reshape(*shape[:batch], groups, shape[batch] // groups, *shape[batch + 1 :])
    # Where the axis of features is now, that of groups taken out: before it they belong.
    apart = jnp.moveaxis(split, batch, features)
    return apart.reshape(
        *(n // groups if i == batch else n * groups if i == features else n
          for i, n in enumerate(shape))
    )  # fmt: skip


def _moved(x: jax.Array, source: Sequence[int], target: Sequence[int]) -> jax.Array:
    """`x` with axis source[i] at target[i]."""
    order = dict(zip(target, source, strict=True))
    return lax.transpose(x, [order[i] for i in range(x.ndim)])


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    images = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(images, (ndim - 1, ndim - 2, *range(ndim - 2)), images)


def _wants_rewriting(eqn: JaxprEqn) -> bool:
    if eqn.primitive is not lax.conv_general_dilated_p:
        return False
    given = eqn.params["dimension_numbers"]
    return eqn.params["batch_group_count"] > 1 or given != _channels_last(len(given.lhs_spec))


def _any_wants_rewriting(jaxpr: Jaxpr) -> bool:
    return any(
        _wants_rewriting(eqn) or any(map(_any_wants_rewriting, inside(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _rewritten(eqn: JaxprEqn) -> JaxprEqn:
    """The operation, with the programs inside it rewritten where they have convolutions."""

    def rewrite(param: Any) -> Any:
        programs = inside({"param": param})
        if not any(map(_any_wants_rewriting, programs)):
            return param
        if isinstance(param, (tuple, list)):
            return type(param)(map(rewrite, param))
        (jaxpr,) = programs
        consts = param.consts if isinstance(param, ClosedJaxpr) else []
        made = jax.make_jaxpr(lambda *inputs: _evaluate(jaxpr, consts, inputs))(
            *(v.aval for v in jaxpr.invars)
        )
        if isinstance(param, ClosedJaxpr):
            return made
        return param if made.consts else made.jaxpr  # it has no room for constants

    return eqn.replace(params={name: rewrite(param) for name, param in eqn.params.items()})
