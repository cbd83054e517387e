"""Defines the sealed sum that a clip passes to the noise stage."""

import dataclasses
import operator
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._gradients.clip.checksum import checksum
from dpoptax._gradients.clip.clip import Clip, as_clip
from dpoptax._gradients.clip.encoding import EncodingClip
from dpoptax._gradients.points import Origin
from dpoptax._support.marks import CLIPPED, VOUCHED, mark
from dpoptax._support.tree import PyTree, is_masked, kind_of, nnx_kinds
from dpoptax._support.xla import materialize

_REMEDY = (
    "Pass the result of `dpoptax.clipped_grad` straight to the noise stage and all other "
    "transforms after it. `dpoptax.accumulate` adds the sums of disjoint parts of one batch."
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """Holds a sum of clipped per-example gradients and the geometry that bounds them.

    `clipped_grad`, `clip_per_example` and `accumulate` create it, and noise stages accept only this
    type. A seal covers everything that the bound depends on, so a noise stage detects changes of
    even one bit. The noise is therefore scaled to the bound by which the summands were clipped. The
    object that `clipped_grad` returned, with the same arrays, needs no comparison with its seal.

    Attributes:
      sum: Σ_ξ clip(g(ξ)), a sum and not a mean, in float32 or wider.
      clip: the geometry. `clip.sensitivity` bounds the contribution of one example in l2 norm.
        Static.
      reference: the public data that the geometry encoded with, for decoding; `None` for none.
      seal: a checksum of everything, uint32. `None` if nothing guarantees the bound; the noise
        stage then raises an error. See `trust_clipped`.
      grid: g, if each summand was rounded to a whole multiple of g and `sum` holds the integers;
        `None` for floating point. Static.
      examples: the largest number of summands, padding included; `None` if unknown. Static.
      unmasked: whether no mask was given, so that every row counts as an example. The noise stage
        then requires the expected batch size. Static.
      origin: the origin of the gradient points; `None` if unknown. Static.
    """

    sum: PyTree
    clip: Clip = dataclasses.field(metadata={"static": True})
    reference: PyTree = None
    seal: jax.Array | None = None
    grid: float | None = dataclasses.field(default=None, metadata={"static": True})
    examples: int | None = dataclasses.field(default=None, metadata={"static": True})
    unmasked: bool = dataclasses.field(default=False, metadata={"static": True})
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    def decode(self, mean: PyTree) -> PyTree:
        """Decodes a mean of the summands to a gradient, shaped like the parameters."""
        clip = self.clip
        return clip.decode(mean, self.reference) if isinstance(clip, EncodingClip) else mean

    def __contains__(self, key: str) -> bool:
        """Returns whether `key` is in `sum`, for flax's `TrainState.apply_gradients`."""
        return isinstance(self.sum, dict) and key in self.sum

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
      TypeError: `clip` is neither a `Clip` nor a number, or a sum on a grid does not hold integers.

    >>> import dpoptax
    >>> trust_clipped(jnp.zeros(2), dpoptax.l2_clip(1.0)).seal.dtype
    dtype('uint32')
    """
    return sealed(mark(total, VOUCHED), as_clip(clip), reference, grid, examples)


def sealed(
    total: PyTree,
    clip: Clip,
    reference: PyTree = None,
    grid: float | None = None,
    examples: int | None = None,
) -> ClippedSum:
    """Seals a sum that was clipped here; see `trust_clipped`."""
    if grid is not None:
        _check_integers(total, grid)
    # Materialized, so that the compiler does not compute the sum a second time for the checksum.
    total = mark(materialize(total), CLIPPED)
    seal = checksum(total, clip, reference, grid, examples)
    return remember_parts(ClippedSum(total, clip, reference, seal, grid, examples))


def remember_parts(clipped: ClippedSum) -> ClippedSum:
    """Notes the arrays and terms of a sum that was sealed just now, for `is_intact`.

    Only the object itself has the note. Transformations of pytrees make another one.
    """
    object.__setattr__(clipped, "_parts", _parts_of(clipped))
    return clipped


def _parts_of(clipped: ClippedSum) -> tuple[list[jax.Array], object]:
    """Returns the arrays of a sum, and the other values that its seal covers."""
    arrays, structure = jax.tree.flatten((clipped.sum, clipped.reference))
    clip = clipped.clip
    return arrays, (structure, type(clip), repr(clip), clipped.grid, clipped.examples)


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
    if any(map(is_masked, jax.tree.leaves(updates.sum, is_leaf=is_masked))):
        raise TypeError(
            "The clipped sum must not have masked leaves, because the whole gradient is clipped "
            "and noised as one vector. Place `optax.masked` after the noise stage, or clip only "
            "the trained parameters."
        )
    # Each part of a complex normal has half of the variance, so it would get too little noise.
    check_real(updates.sum)
    if updates.seal is None:
        raise TypeError(
            "The `ClippedSum` has no seal, because it was assembled by hand, and its bound is "
            "unknown. Create it with `dpoptax.clipped_grad` or `dpoptax.extend.clip_per_example`, "
            "or vouch for the bound with `dpoptax.extend.trust_clipped(total, clip)`."
        )
    seal = jnp.asarray(updates.seal)
    if seal.dtype != jnp.uint32 or seal.shape != ():
        raise TypeError(
            "The seal of the `ClippedSum` must be a uint32 scalar, got "
            f"{seal.dtype}{list(seal.shape)}. A transform between the clip and the noise stage "
            "(scale, sgd, sign, a schedule, a cast) changed it and the sum, so the clipping bound "
            f"no longer holds. {_REMEDY}"
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


def is_intact(clipped: ClippedSum) -> jax.Array | np.bool_:
    """Returns whether sum, geometry and reference are unchanged since the seal.

    If the object is the one that was sealed, with the same arrays, this is known before the program
    runs, which then has no checksum.
    """
    noted, (arrays, rest) = getattr(clipped, "_parts", ((), None)), _parts_of(clipped)
    same = len(noted[0]) == len(arrays) and all(map(operator.is_, noted[0], arrays))
    # Arrays of JAX do not change, but those of NumPy may.
    if same and noted[1] == rest and all(isinstance(x, jax.Array) for x in arrays):
        return np.bool_(True)
    how = clipped.grid, clipped.examples
    found = checksum(clipped.sum, clipped.clip, clipped.reference, *how)
    return jnp.equal(jnp.asarray(clipped.seal), found)
