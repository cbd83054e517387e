"""Convolutions as XLA's fast kernels on CPU take them, and without groups of the batch.

These know one order of axes, channels last. XLA writes the convolutions of a program in it, but
not those inside of a loop: a gradient's, whose axes are in another order, take fifty times as long
there. So they are written in it before XLA sees them; on other platforms than CPU they stay.

The gradient by the kernel of a grouped convolution has groups of the batch, and `jax.vmap` makes
groups of examples of them. XLA computes each group with all others times zero, and what is not
finite in one example, NaN in all: without it they would not be. So they are written as groups of
features, which it keeps apart, on all platforms.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn


def wants_rewriting(eqn: JaxprEqn) -> bool:
    """Whether a convolution has another order of axes, or groups of the batch."""
    given = eqn.params["dimension_numbers"]
    return eqn.params["batch_group_count"] > 1 or given != _channels_last(len(given.lhs_spec))


def rewritten(eqn: JaxprEqn, images: jax.Array, kernels: jax.Array) -> jax.Array:
    """The same convolution with channels last on CPU, and with groups of features."""
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
