"""Defines the sealed sum that a clip passes to the noise stage."""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from dpoptax._clipped_sum.seal import Leaf, is_sealed, seal, unseal
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._support.marks import CLIPPED, VOUCHED, mark
from dpoptax._support.tree import PyTree, is_masked, kind_of, nnx_kinds
from dpoptax._support.xla import materialize

_REMEDY = (
    "Pass the result of `dpoptax.clipped_grad` straight to the noise stage and all other "
    "transforms after it. `dpoptax.accumulate` adds the sums of disjoint parts of one batch."
)


class Terms(NamedTuple):
    """Describes how a sum was clipped. Static.

    Attributes:
      clip: the geometry. `clip.sensitivity` bounds the contribution of one example in l2 norm.
      grid: g, if each summand was rounded to a whole multiple of g and the sum holds the integers;
        `None` for floating point.
      examples: the largest number of summands, padding included; `None` if unknown.
      unmasked: whether no mask was given, so that every row counts as an example. The noise stage
        then requires the expected batch size.
      points_code: identifies the gradient points, see `points.points_code`; 0 if unknown.
    """

    clip: Clip
    grid: float | None = None
    examples: int | None = None
    unmasked: bool = False
    points_code: int = 0

    @property
    def identity(self) -> Hashable:
        """The terms and the module of the clip, whose name alone may not be unique."""
        return type(self.clip).__module__, self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Holds a sum of clipped per-example gradients and the geometry that bounds them.

    `clipped_grad`, `clip_per_example` and `accumulate` create it, and noise stages accept only this
    type. Its arrays are sealed: their dtype accepts no arithmetic, and states the clip, the shape
    and the place of each array. A transform between clip and noise therefore raises a `TypeError`
    while the step is traced, and the noise is scaled to the bound by which the summands were
    clipped. The seal costs nothing in a compiled program.

    Attributes:
      sealed: the sum and the reference, sealed.
      terms: how the sum was clipped. Static.
      leaves: the arrays before they were sealed. Static.
    """

    sealed: PyTree
    terms: Terms = dataclasses.field(metadata={"static": True})
    leaves: tuple[Leaf, ...] = dataclasses.field(metadata={"static": True})

    @property
    def sum(self) -> PyTree:
        """Returns Σ_ξ clip(g(ξ)), a sum and not a mean, in float32 or wider. It is private."""
        total, _ = self.sealed
        return unseal(total, self.leaves[: len(jax.tree.leaves(total))])

    @property
    def reference(self) -> PyTree:
        """Returns the public data that the geometry encoded with; `None` for none."""
        total, reference = self.sealed
        return unseal(reference, self.leaves[len(jax.tree.leaves(total)) :])

    @property
    def clip(self) -> Clip:
        """Returns the geometry. `clip.sensitivity` bounds the contribution of one example."""
        return self.terms.clip

    def decode(self, mean: PyTree) -> PyTree:
        """Decodes a mean of the summands to a gradient, shaped like the parameters."""
        return self.clip.decode(mean, self.reference) if self.clip.encodes else mean

    def __contains__(self, key: str) -> bool:
        """Returns whether `key` is in `sum`, for flax's `TrainState.apply_gradients`."""
        return isinstance(self.sealed[0], dict) and key in self.sealed[0]

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "A `ClippedSum` does not support arithmetic. It is private until the noise stage, such "
            "as `dpoptax.gaussian_noise` at the head of the chain, adds noise and divides by the "
            f"batch size. {_REMEDY}"
        )

    # The errors of Python and JAX would not state the remedy. Functions of `jax.numpy` call
    # `__jax_array__`.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = _refuse
    __jax_array__ = _refuse


def trust_clipped(
    total: PyTree,
    clip: Clip | float,
    reference: PyTree = None,
    *,
    grid: float | None = None,
    examples: int | None = None,
) -> ClippedSum:
    """Seals a sum that was clipped elsewhere as a `ClippedSum`.

    Use it for sums that `clipped_grad` and `clip_per_example` did not compute, such as those of
    your own kernel. Privacy: the caller guarantees that one example changes `total` by at most
    `clip.sensitivity` in l2 norm, whatever its data. This cannot be checked.

    Args:
      total: the sum, shaped like the parameters, or as the geometry encodes.
      clip: the geometry that bounds the summands. A number C means `l2_clip(C)`.
      reference: the public data that the geometry encoded with; `None` for none.
      grid: the unit of the integers in `total`, to which each summand was rounded; `None` for sums
        in floating point.
      examples: the largest number of summands, for `accumulate`.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number, the sum is complex, or a sum on a grid
        does not hold integers.

    >>> import dpoptax
    >>> trust_clipped(jnp.zeros(2), dpoptax.l2_clip(1.0)).sum
    Array([0., 0.], dtype=float32)
    """
    return sealed(mark(total, VOUCHED), Terms(as_clip(clip), grid, examples), reference)


def sealed(
    total: PyTree,
    terms: Terms,
    reference: PyTree = None,
    *,
    accumulated: bool = False,
    stored: bool = False,
) -> ClippedSum:
    """Seals a sum that was clipped here, or accumulated from such sums; see `trust_clipped`.

    It is materialized, so that the compiler does not compute it again for each of its readers,
    unless it, or the bundles that it is cut from, are `stored`: cutting them is exact.
    """
    if terms.grid is not None:
        _check_integers(total, terms.grid)
    # Each part of a complex normal has half of the variance, so it would get too little noise.
    check_real(total)
    total = total if stored else materialize(total)
    total = total if accumulated else mark(total, CLIPPED)
    arrays, leaves = seal((total, reference), terms.identity)
    return ClippedSum(arrays, terms, leaves)


def _check_integers(total: PyTree, grid: float) -> None:
    dtypes = {str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(total)}
    if not all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        raise TypeError(
            f"A sum with grid={grid} must hold integers, got {', '.join(sorted(dtypes))}. Pass the "
            "integers, or omit `grid`."
        )


def check_clipped_sum(updates: object) -> ClippedSum:
    """Returns `updates`, or raises an error if it is not a sum or visibly changed."""
    if not isinstance(updates, ClippedSum):
        if "State" in nnx_kinds(updates):
            raise TypeError(
                "The noise stage needs a `ClippedSum`, got an nnx.State. `nnx.Optimizer.update` "
                "converts a `ClippedSum` to one. Call the transform on the pure states instead: "
                "`optimizer.tx.update(grads, nnx.as_pure(optimizer.opt_state), params)`, then "
                "`nnx.update(model, optax.apply_updates(params, updates))` and "
                "`nnx.update(optimizer.opt_state, nnx.state(opt_state))`. Gradients that were not "
                "clipped per example cannot be made private. Take them with "
                "`dpoptax.clipped_grad`."
            )
        raise TypeError(
            f"The noise stage needs a `ClippedSum`, got {kind_of(updates)}. Gradients that were "
            "not clipped per example cannot be made private. Take them with "
            "`dpoptax.clipped_grad`, or pass per-example gradients to `dpoptax.clip_and_noise`. If "
            f"a transform changed a `ClippedSum` before the noise stage, reorder them. {_REMEDY}"
        )
    if any(map(is_masked, jax.tree.leaves(updates.sealed, is_leaf=is_masked))):
        raise TypeError(
            "The clipped sum must not have masked leaves, because the whole gradient is clipped "
            "and noised as one vector. Place `optax.masked` after the noise stage, or clip only "
            "the trained parameters."
        )
    if not is_sealed(updates.sealed, updates.leaves, updates.terms.identity):
        raise TypeError(
            "The arrays of the `ClippedSum` must be those that were clipped, with their clip, "
            "places and shapes. It was assembled by hand or changed, so its bound is unknown. "
            f"{_REMEDY} `dpoptax.extend.trust_clipped(total, clip)` vouches for a sum that was "
            "clipped elsewhere."
        )
    return updates


def check_real(tree: PyTree) -> None:
    """Raises an error if a leaf is complex, because bounds are for real coordinates."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"Gradients must be real, but {jax.tree_util.keystr(path) or 'the gradient'} is "
                f"{jnp.result_type(leaf)}. Clip and noise act on real coordinates. Store the real "
                "and imaginary parts as two real arrays and combine them in the loss."
            )


def check_released(name: str, updates: PyTree) -> None:
    """Raises an error if the update of a transform is private."""
    if isinstance(updates, ClippedSum):
        raise TypeError(
            f"`{name}` got a `ClippedSum`, which is private. Place it after the noise stage."
        )
