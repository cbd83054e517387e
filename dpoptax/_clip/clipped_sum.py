"""The clipped sum on its way from the clip to the noise, under a seal that any change breaks."""

import dataclasses
from typing import NoReturn

import jax
import jax.numpy as jnp

from dpoptax._clip.checksum import checksum
from dpoptax._clip.clip import Clip, as_clip, check_clip
from dpoptax._linear_map import LinearMap
from dpoptax._marks import CLIPPED, VOUCHED, mark
from dpoptax._points import Origin
from dpoptax._tree import PyTree, is_masked, kind_of, nnx_kinds
from dpoptax._xla import materialize

_REMEDY = (
    "give what dpoptax.clipped_grad returns straight to the noise stage and put all other "
    "transforms behind it; dpoptax.accumulate adds the sums of disjoint parts of one batch"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum over examples of clipped gradients, and the geometry that bounds each summand.

    `clipped_grad`, `clip_per_example` and `accumulate` make one, and the noise stage accepts
    nothing else, bit for bit: a seal over all that the bound rests on says whether it was changed
    on the way. What is noised was clipped, by the bound that the noise is scaled to.

    Attributes:
      sum: Σ_ξ clip(g(ξ)), a sum and not a mean, in float32 at least.
      clip: the geometry; `clip.sensitivity` bounds what one example adds, in l2 norm. Static.
      reference: the public data that the geometry encoded with, for decoding; `None` for none.
      seal: the checksum of all, uint32. `None` where nobody answers for the bound, which the
        noise stage refuses; see `trust_clipped`.
      grid: g, where the summands were rounded to whole multiples of g and added as integers, which
        `sum` then holds; `None` for floating point. Static.
      linear_map: the public map that gradients went through before the clip; `None` for none.
      examples: how many summands there are at most, padding included; `None` where nobody said.
        Static.
      unmasked: whether each row of the batch was taken for an example, as no mask was given, which
        the noise stage refuses where their number is not the expected batch size. Static.
      origin: how the points of the gradients were made; `None` where it is not known. Static.
    """

    sum: PyTree
    clip: Clip = dataclasses.field(metadata={"static": True})
    reference: PyTree = None
    seal: jax.Array | None = None
    grid: float | None = dataclasses.field(default=None, metadata={"static": True})
    linear_map: LinearMap | None = None
    examples: int | None = dataclasses.field(default=None, metadata={"static": True})
    unmasked: bool = dataclasses.field(default=False, metadata={"static": True})
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})

    def decode(self, mean: PyTree) -> PyTree:
        """The gradient, shaped like the parameters, that a mean of such summands stands for."""
        gradient = self.clip.decode(mean, self.reference)
        return gradient if self.linear_map is None else self.linear_map.returned(gradient)

    def __contains__(self, key: str) -> bool:
        """Whether `key` is in `sum`: flax's `TrainState.apply_gradients` asks that of gradients."""
        return isinstance(self.sum, dict) and key in self.sum

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "a ClippedSum takes no arithmetic: it is private until the noise stage, such as "
            "dpoptax.gaussian_noise at the head of the chain, adds noise and divides by the batch "
            f"size; {_REMEDY}"
        )

    # Python's and JAX's own errors would not say where the sum belongs. Functions of `jax.numpy`
    # call `__jax_array__`.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = _refuse
    __jax_array__ = _refuse


def trust_clipped(
    total: PyTree,
    clip: Clip | float,
    reference: PyTree = None,
    *,
    grid: float | None = None,
    linear_map: LinearMap | None = None,
    examples: int | None = None,
) -> ClippedSum:
    """Vouches for a sum that was clipped elsewhere: a `ClippedSum` with a seal.

    For sums that `clipped_grad` and `clip_per_example` did not make, such as those of a kernel of
    your own. Privacy: the promise rests on the caller: that one example moves `total` by at most
    `clip.sensitivity`, in l2 norm, whatever its data. Nothing here can check that.

    Args:
      total: the sum, shaped like the parameters, or as the geometry encodes.
      clip: the geometry that bounds the summands. A number C means `l2_clip(C)`.
      reference: the public data that it encoded with; `None` for none.
      grid: what the integers of `total` count, after each summand was rounded to it; `None` for
        sums in floating point.
      linear_map: the public map that gradients went through before the clip; `None` for none.
      examples: how many summands there are at most, for `accumulate`.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number, or a sum on a grid is not of integers.

    >>> import dpoptax
    >>> trust_clipped(jnp.zeros(2), dpoptax.l2_clip(1.0)).seal.dtype
    dtype('uint32')
    """
    return sealed(mark(total, VOUCHED), as_clip(clip), reference, grid, linear_map, examples)


def sealed(
    total: PyTree,
    clip: Clip,
    reference: PyTree = None,
    grid: float | None = None,
    linear_map: LinearMap | None = None,
    examples: int | None = None,
) -> ClippedSum:
    """As `trust_clipped`, for a sum that was clipped here."""
    check_clip(clip)
    dtypes = {str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(total)}
    if grid is not None and not all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        raise TypeError(
            f"a sum with grid={grid} counts steps of it, in integers, and this one is of "
            f"{', '.join(sorted(dtypes))}: give the integers, or leave out the grid"
        )
    # What is sealed is what is kept: no compiler computes the sum a second time for the checksum.
    total = mark(materialize(total), CLIPPED)
    seal = checksum(total, clip, (reference, linear_map), grid, examples)
    return ClippedSum(total, clip, reference, seal, grid, linear_map, examples)


def check_clipped_sum(updates: object) -> ClippedSum:
    """Returns `updates`, or raises where types and shapes show that it is not as it was made."""
    if not isinstance(updates, ClippedSum):
        if "State" in nnx_kinds(updates):
            raise TypeError(
                "the noise stage got an nnx.State, not a ClippedSum. If nnx.Optimizer.update made "
                "it of one, as it does, call the transform on the pure states instead: "
                "optimizer.tx.update(grads, nnx.as_pure(optimizer.opt_state), params), and then "
                "nnx.update(model, optax.apply_updates(params, updates)) and "
                "nnx.update(optimizer.opt_state, nnx.state(opt_state)). Gradients that were not "
                "clipped per example cannot be made private: take them with dpoptax.clipped_grad"
            )
        raise TypeError(
            f"the noise stage got {kind_of(updates)}, not a ClippedSum: gradients that "
            "were not clipped per example cannot be made private. Take them with "
            "dpoptax.clipped_grad, or give per-example gradients to dpoptax.clip_and_noise. "
            f"Where a ClippedSum was changed on the way, {_REMEDY}"
        )
    if any(map(is_masked, jax.tree.leaves(updates.sum, is_leaf=is_masked))):
        raise TypeError(
            "the clipped sum has masked leaves: the whole gradient is clipped and noised as one "
            "vector. Put optax.masked behind the noise stage, or clip the trained parameters only"
        )
    # Of a complex normal each part has half of the variance, and so of the noise that is priced.
    check_real(updates.sum)
    if updates.seal is None:
        raise TypeError(
            "this ClippedSum has no seal: it was assembled by hand, and its bound is unknown. Make "
            "it with dpoptax.clipped_grad or dpoptax.extend.clip_per_example, or vouch for the "
            "bound yourself with dpoptax.extend.trust_clipped(total, clip)"
        )
    seal = jnp.asarray(updates.seal)
    if seal.dtype != jnp.uint32 or seal.shape != ():
        raise TypeError(
            f"the seal of the ClippedSum has become {seal.dtype}{list(seal.shape)}: a transform "
            "between the clip and the noise stage (scale, sgd, sign, a schedule, a cast) changed "
            f"it, and the sum with it, so that the clip's bound no longer holds; {_REMEDY}"
        )
    return updates


def check_real(tree: PyTree) -> None:
    """Raises where a leaf is complex: a clip bound is stated for real coordinates."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path) or 'the gradient'} is {jnp.result_type(leaf)}: "
                "gradients are clipped and noised in real coordinates; hold real and imaginary "
                "part as two real arrays and combine them in the loss"
            )


def check_released(name: str, updates: PyTree) -> None:
    """Raises where what arrives at a transform is private."""
    if isinstance(updates, ClippedSum):
        raise TypeError(f"{name} got a ClippedSum, which is private: put it behind the noise stage")


def is_intact(clipped: ClippedSum) -> jax.Array:
    """Returns whether sum, geometry and reference are bit for bit what was sealed, a boolean."""
    how = clipped.grid, clipped.examples
    found = checksum(clipped.sum, clipped.clip, public_part(clipped), *how)
    return jnp.equal(jnp.asarray(clipped.seal), found)


def public_part(clipped: ClippedSum) -> tuple[PyTree, LinearMap | None]:
    """What the summands were made with, beside the data."""
    return clipped.reference, clipped.linear_map
