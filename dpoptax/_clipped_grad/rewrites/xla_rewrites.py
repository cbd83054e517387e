"""Rewrites operations that XLA computes wrongly, or slowly on CPU.

Correctness: the gradient of a grouped convolution with respect to its kernel is a convolution with
batch groups, and `jax.vmap` makes groups of examples from them. XLA computes a group together with
all others, multiplied by zero. So a non-finite number in one example becomes NaN in all.
`_split_features` uses feature groups instead, which XLA keeps separate on all platforms.

Speed, on CPU only: XLA's fast convolutions require channels last. XLA
converts convolutions to this order, except inside loops. It also computes the gradient of
max-pooling with a scatter on one thread. Without these rewrites, micro-batched steps of small CNNs
are several times slower.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from dpoptax._clipped_grad.rewrites.rewriting import Constants


def rule(eqn: JaxprEqn, constants: Constants) -> Callable[..., jax.Array] | None:
    """Returns the replacement of a convolution or pooling, `None` for all other operations."""
    del constants
    if eqn.primitive is lax.conv_general_dilated_p:
        given, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
        wanted = given != _channels_last(len(given.lhs_spec)) or groups > 1
        return functools.partial(_rewrite_convolution, eqn) if wanted else None
    if eqn.primitive is lax.select_and_scatter_add_p and windows_are_apart(eqn):
        return functools.partial(_rewrite_pooling, eqn)
    return None


def _rewrite_convolution(eqn: JaxprEqn, images: jax.Array, kernels: jax.Array) -> jax.Array:
    """Computes the same convolution with feature groups, and channels last on CPU."""
    given = eqn.params["dimension_numbers"]
    last = _channels_last(images.ndim)
    params = dict(eqn.params)
    if (groups := params["batch_group_count"]) > 1:
        # The images of a group become features of one image, which feature groups keep separate.
        images = _split_features(images, groups, *given.lhs_spec[:2])
        params |= {"batch_group_count": 1, "feature_group_count": groups}

    def convolve_channels_last(images: jax.Array, kernels: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated_p.bind(
            _reorder_axes(images, given.lhs_spec, last.lhs_spec),
            _reorder_axes(kernels, given.rhs_spec, last.rhs_spec),
            **{**params, "dimension_numbers": last},
        )
        return _reorder_axes(out, last.out_spec, given.out_spec)

    unchanged = functools.partial(lax.conv_general_dilated_p.bind, **params)
    return lax.platform_dependent(images, kernels, cpu=convolve_channels_last, default=unchanged)


def _split_features(images: jax.Array, groups: int, batch: int, features: int) -> jax.Array:
    """Moves the groups of `images` from the batch axis to the feature axis."""
    shape = images.shape
    split = images.reshape(*shape[:batch], groups, shape[batch] // groups, *shape[batch + 1 :])
    # Without the axis of groups, the others have their old numbers. So `moveaxis` puts the groups
    # directly before the features.
    apart = jnp.moveaxis(split, batch, features)
    return apart.reshape(
        *(n // groups if i == batch else n * groups if i == features else n
          for i, n in enumerate(shape))
    )  # fmt: skip


def _reorder_axes(x: jax.Array, source: Sequence[int], target: Sequence[int]) -> jax.Array:
    """Returns `x` with axis source[i] at target[i]."""
    order = dict(zip(target, source, strict=True))
    return lax.transpose(x, [order[i] for i in range(x.ndim)])


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    images = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(images, (ndim - 1, ndim - 2, *range(ndim - 2)), images)


def windows_are_apart(eqn: JaxprEqn) -> bool:
    """Returns whether the windows of a pooling are disjoint.

    Each entry of the input is then in at most one window. Its gradient is that of the window if it
    is the first maximum, and zero otherwise.
    """
    windows, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    return all(size <= stride for size, stride in zip(windows, strides, strict=True))


def _rewrite_pooling(eqn: JaxprEqn, source: jax.Array, operand: jax.Array) -> jax.Array:
    """Computes the same gradient, on CPU by comparing the entries of each window."""
    compare_entries = functools.partial(select_and_place, **eqn.params)
    unchanged = functools.partial(eqn.primitive.bind, **eqn.params)
    found: jax.Array = lax.platform_dependent(
        source, operand, cpu=compare_entries, default=unchanged
    )
    return found


def select_and_place(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Puts each entry of `source` at the selected entry of its window of `operand`.

    The entries of a window are compared in XLA's order: the selected entry stays selected if
    `select_prim(selected, next)` holds. As in JAX, padding is never selected over an entry.
    """
    places = list(itertools.product(*map(range, window_dimensions)))
    zero = np.zeros((), operand.dtype)
    # Padding must lose every comparison, for maxima and for minima: an entry at the edge would
    # otherwise lose its gradient to a place outside of the image.
    never = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, operand.dtype)
    padded = lax.pad(operand, never, [(low, high, 0) for low, high in padding])
    entries = [
        lax.slice(padded, place, _slice_ends(place, source.shape, window_strides), window_strides)
        for place in places
    ]
    selected, chosen = entries[0], jnp.zeros(source.shape, jnp.int32)
    for i, entry in enumerate(entries[1:], 1):
        stays = select_prim.bind(selected, entry)
        selected, chosen = jnp.where(stays, selected, entry), jnp.where(stays, chosen, i)

    def placed(i: int, place: Sequence[int]) -> jax.Array:
        # Interior padding spaces the gradients of neighboring windows by the stride.
        config = [
            (at - low, size + low - stop, stride - 1)
            for at, stop, (low, _), size, stride in zip(
                place,
                _slice_ends(place, source.shape, window_strides),
                padding,
                operand.shape,
                window_strides,
                strict=True,
            )
        ]
        return lax.pad(jnp.where(chosen == i, source, zero), zero, config)

    # Windows add in a fixed order of their places, also if they overlap.
    return functools.reduce(jnp.add, itertools.starmap(placed, enumerate(places)))


def _slice_ends(place: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the ends of slices that select the entry at `place` of every window."""
    return [
        at + (size - 1) * stride + 1 for at, size, stride in zip(place, shape, strides, strict=True)
    ]
