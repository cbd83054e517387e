"""The clipped sum on its way from the clip to the noise, under a seal that any change breaks."""

import dataclasses
import math
import operator
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clips.base import Clip, check_clip
from dpoptax._clips.bounds import check_rounding
from dpoptax._clips.grid import check_capacity
from dpoptax._clips.sums import add_to, of_parts
from dpoptax._maps import LinearMap
from dpoptax._marks import CLIPPED, VOUCHED, mark
from dpoptax._trees import (
    PyTree,
    alike,
    float32_at_least,
    held,
    is_masked,
    nnx_kinds,
    out_sharding,
)

# The golden ratio's bits, and the multipliers of the hash "lowbias32" (C. Wellons, 2018).
_POSITION, _MIX = 0x9E3779B9, (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
_ARRAYS = "_arrays"
_REMEDY = (
    "give what dpoptax.clipped_grad returns straight to the noise stage and put all other "
    "transforms behind it; dpoptax.accumulate adds the sums of disjoint parts of one batch"
)


class _Named(type):
    """Shows the way in the errors of pytrees, which print a class and nothing else."""

    def __repr__(cls) -> str:
        return (
            f"<class '{cls.__module__}.{cls.__qualname__}': no transform may stand in front of or "
            f"around the noise stage; {_REMEDY}>"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedSum(metaclass=_Named):
    """A sum over examples of clipped gradients, and the geometry that bounds each summand.

    `clipped_grad`, `clip_per_example` and `accumulate` make one, and the noise stage accepts
    nothing else, bit for bit: a seal over all that the bound rests on says whether it was changed
    on the way. What is noised was clipped, by the bound that the noise is scaled to.

    Attributes:
      sum: Σ_ξ clip(g(ξ)), a sum and not a mean, in float32 at least.
      clip: the geometry; `clip.sensitivity` bounds what one example adds, in l2 norm. Static.
      reference: the public data that the geometry encoded with, for decoding; `None` for none.
      seal: the checksum of all, uint32. `None` where nobody answers for the bound, which the
        noise stage refuses; see `assert_clipped`.
      grid: g, where the summands were rounded to whole multiples of g and added as integers, which
        `sum` then holds; `None` for floating point. Static.
      linear_map: the public map that gradients went through before the clip; `None` for none.
      examples: how many summands there are at most, padding included; `None` where nobody said.
        Static.
      unmasked: whether each row of the batch was taken for an example, as no mask was given, which
        the noise stage refuses where their number is not the expected batch size. Static.
    """

    sum: PyTree
    clip: Clip = dataclasses.field(metadata={"static": True})
    reference: PyTree = None
    seal: jax.Array | None = None
    grid: float | None = dataclasses.field(default=None, metadata={"static": True})
    linear_map: LinearMap | None = None
    examples: int | None = dataclasses.field(default=None, metadata={"static": True})
    unmasked: bool = dataclasses.field(default=False, metadata={"static": True})

    def decode(self, mean: PyTree) -> PyTree:
        """The gradient, shaped like the parameters, that a mean of such summands stands for."""
        gradient = self.clip.decode(mean, self.reference)
        return gradient if self.linear_map is None else self.linear_map.returned(gradient)

    def __contains__(self, key: str) -> bool:
        """Whether `key` is in `sum`: flax's `TrainState.apply_gradients` asks that of gradients."""
        return isinstance(self.sum, dict) and key in self.sum


def assert_clipped(
    total: PyTree,
    clip: Clip,
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
      clip: the geometry that bounds the summands.
      reference: the public data that it encoded with; `None` for none.
      grid: what the integers of `total` count, after each summand was rounded to it; `None` for
        sums in floating point.
      linear_map: the public map that gradients went through before the clip; `None` for none.
      examples: how many summands there are at most, for `accumulate`.

    Raises:
      TypeError: `clip` is no geometry, or a sum on a grid is not of integers.

    >>> import dpoptax
    >>> assert_clipped(jnp.zeros(2), dpoptax.l2_clip(1.0)).seal.dtype
    dtype('uint32')
    """
    return sealed(mark(total, VOUCHED), clip, reference, grid, linear_map, examples)


def sealed(
    total: PyTree,
    clip: Clip,
    reference: PyTree = None,
    grid: float | None = None,
    linear_map: LinearMap | None = None,
    examples: int | None = None,
) -> ClippedSum:
    """As `assert_clipped`, for a sum that was clipped here."""
    check_clip(clip)
    dtypes = {str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(total)}
    if grid is not None and not all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        raise TypeError(
            f"a sum with grid={grid} counts steps of it, in integers, and this one is of "
            f"{', '.join(sorted(dtypes))}: give the integers, or leave out the grid"
        )
    # What is sealed is what is kept: no compiler computes the sum a second time for the checksum.
    total = mark(held(total), CLIPPED)
    seal = checksum(total, clip, (reference, linear_map), grid, examples)
    return as_made(ClippedSum(total, clip, reference, seal, grid, linear_map, examples))


def accumulate(*sums: ClippedSum) -> ClippedSum:
    """Adds the clipped sums of disjoint parts of one batch: Σ_k S_k, under a seal of its own.

    For batches whose parts come one after the other, such as from files. Where the batch is at
    hand, `clipped_grad(..., microbatch_size=...)` does the same in one call.

    Privacy: the result is the clipped sum of the whole batch. Proof: a record is in at most one
    part k. It moves S_k by at most C = `clip.sensitivity`, in l2 norm, by that part's own bound,
    and none of the others. The parts are added with what rounding takes off, so that it changes in
    the rounding of Σ_k S_k, of B examples together, at most τ C, τ = 1.01 · 2⁻²² B, whatever the
    number of parts, and the total is multiplied by 1 − τ: in each call, so give one call all parts.
    The sums must be of *parts of one draw of the sampler*. Those of several draws, or of several
    losses on one batch, are not disjoint: a record would move their total by C for each one that it
    is in. Nothing here can see that. For several losses, give `clipped_grad` one loss function that
    returns their sum: its gradient is the joint one, clipped as one vector.

    Args:
      sums: at least one `ClippedSum`, of one geometry and one reference, each as it was made.

    Returns:
      A `ClippedSum`. Its seal is broken, and so the release refused, where that of a part is, or
      where the references differ.

    Raises:
      TypeError: something that is no `ClippedSum`, or one that was visibly changed.
      ValueError: no sums, geometries that differ, one sum given twice, rows of a table that
        were selected for each, a sum of nobody knows how many examples, or of so many that τ is
        above 1/2, or on a grid that integers of 32 bits do not hold it.

    >>> import dpoptax
    >>> clip, params = dpoptax.clip_per_example(dpoptax.l2_clip(1.0)), jnp.zeros(1)
    >>> parts = [clip.update(jnp.ones((2, 1)), clip.init(params), params)[0] for _ in range(2)]
    >>> accumulate(*parts).sum.round(3)
    Array([4.], dtype=float32)
    """
    if not sums:
        raise ValueError("accumulate got no sums: want at least one ClippedSum")
    if isinstance(sums[0], list | tuple):
        raise TypeError(
            f"accumulate got a {type(sums[0]).__name__}: want each ClippedSum as an argument of "
            "its own, dpoptax.accumulate(*sums)"
        )
    parts = [check_clipped_sum(part) for part in sums]
    first = parts[0]
    if first.clip.selects:
        raise ValueError(
            "the rows of each sum were selected for itself, by the same noise, and are others: "
            "they can neither be added nor priced together. Give the whole batch to "
            "dpoptax.tables.selected_grad(..., microbatch_size=...), or select rows once with "
            "dpoptax.tables.select_rows"
        )
    for i, part in enumerate(parts):
        if (part.clip, part.grid) != (first.clip, first.grid):
            raise ValueError(
                f"sums[0] was made with clip={first.clip}, sums[{i}] with clip={part.clip} (grids "
                f"{first.grid} and {part.grid}): want parts of one batch, clipped by one geometry"
            )
        if any(part is other for other in parts[:i]):
            raise ValueError(f"sums[{i}] is given twice: want disjoint parts of one batch")
    structures = {jax.tree.structure((part.sum, _public(part))) for part in parts}
    if len(structures) > 1:
        raise ValueError(f"the sums have different structures: {structures}")
    sound = jnp.all(jnp.stack([is_intact(part) for part in parts]))
    references = jnp.stack([_checksum_of_leaves(_public(part), 0) for part in parts])
    sound &= jnp.all(references == references[0])
    counts = [part.examples for part in parts]
    if None in counts:
        raise ValueError(
            f"sums[{counts.index(None)}] does not say how many examples it is of, and so not what "
            "rounding can do: give dpoptax.assert_clipped(..., examples=B)"
        )
    examples = sum(count for count in counts if count is not None)
    # Two roundings: of the total with what was taken off, and of the product.
    change = of_parts(3, examples)
    if first.grid is None:
        check_rounding(change)
    else:
        check_capacity(first.clip, first.grid, examples)

    def add(*leaves: jax.Array) -> jax.Array:
        if first.grid is not None or len(leaves) == 1:
            return sum(leaves[1:], leaves[0])
        wide = float32_at_least(*leaves)  # whose rounding τ is of
        total, *rest = (leaf.astype(wide) for leaf in leaves)
        lost = jnp.zeros_like(total)
        for leaf in rest:
            total, lost = add_to(total, lost, leaf)
        return (total + lost) * (1.0 - change)

    total = held(jax.tree.map(add, *(part.sum for part in parts)))
    seal = checksum(total, first.clip, _public(first), first.grid, examples)
    seal = jnp.where(sound, seal, ~seal)
    # Not `as_made`: whether the parts were sound is in the seal alone.
    unmasked = any(part.unmasked for part in parts)
    return dataclasses.replace(first, sum=total, seal=seal, examples=examples, unmasked=unmasked)


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
            f"the noise stage got a {type(updates).__name__}, not a ClippedSum: gradients that "
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
            "this ClippedSum has no seal: it was put together by hand, so nobody answers for its "
            "bound. Take it with dpoptax.clipped_grad or dpoptax.clip_per_example, or answer for "
            "it yourself with dpoptax.assert_clipped(total, clip)"
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


def as_made(clipped: ClippedSum) -> ClippedSum:
    """Notes on the object which arrays its sum and reference are, for `is_intact`.

    Only for who made the sum. The note is no part of the pytree: whatever goes through a transform
    comes out as another object, without it.
    """
    leaves, rest = _contents(clipped)
    if all(isinstance(leaf, jax.Array) for leaf in leaves):  # NumPy's can be written to
        object.__setattr__(clipped, _ARRAYS, (leaves, rest))
    return clipped


def is_intact(clipped: ClippedSum) -> jax.Array:
    """Whether sum, geometry and reference are what was sealed, a boolean scalar.

    Arrays cannot be changed, traced or not. Where the very objects that were noted when the sum was
    made arrive, all is what it was, and no checksum is computed, not even in the compiled program
    for the seal. Whatever else arrives is compared by its bits.
    """
    leaves, rest = _contents(clipped)
    noted = getattr(clipped, _ARRAYS, None)
    if noted and rest == noted[1] and all(map(operator.is_, leaves, noted[0])):
        return jnp.bool_(True)
    how = clipped.grid, clipped.examples
    found = checksum(clipped.sum, clipped.clip, _public(clipped), *how)
    return jnp.equal(jnp.asarray(clipped.seal), found)


def _contents(clipped: ClippedSum) -> tuple[list[jax.Array], tuple[object, ...]]:
    """The arrays that are sealed, and what is sealed with them, which tells by equality."""
    leaves, structure = jax.tree.flatten((clipped.sum, _public(clipped)))
    return leaves, (structure, clipped.clip, clipped.grid, clipped.examples)


def _public(clipped: ClippedSum) -> tuple[PyTree, LinearMap | None]:
    """What the summands were made with, beside the data."""
    return clipped.reference, clipped.linear_map


def checksum(
    total: PyTree,
    clip: Clip,
    public: PyTree,
    grid: float | None = None,
    examples: int | None = None,
) -> jax.Array:
    """A uint32 that depends on every bit of the arrays, their places, and what is said of them.

    One entry of another value, or entries or leaves that change places, give another checksum; of
    changes to more entries at random one in 2³² does not show. It guards against mistakes, not
    against who computes a matching one. Integers add up to the same in any order: it is equal
    however the arrays are split over devices.
    """
    kind = type(clip)
    salt = zlib.crc32(f"{kind.__module__}.{clip!r} {grid} {examples}".encode())
    sums = _checksum_of_leaves(total, salt)
    return mixed(sums ^ _checksum_of_leaves(public, ~salt & 0xFFFFFFFF))


def _checksum_of_leaves(tree: PyTree, salt: int) -> jax.Array:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    labels = [
        zlib.crc32(f"{i} {leaf.dtype}{leaf.shape}".encode(), salt) for i, leaf in enumerate(leaves)
    ]
    found = jnp.uint32((salt + sum(labels)) & 0xFFFFFFFF)
    for indices in alike(leaves):
        stack = jnp.stack([leaves[i] for i in indices])
        label = np.array([labels[i] for i in indices], np.uint32)
        label = label.reshape(-1, *(1,) * (stack.ndim - 1))
        for j, words in enumerate(_words(stack)):
            place = _places(stack) + (label + np.uint32(j * 0x85EBCA6B & 0xFFFFFFFF))
            found += jnp.sum(mixed(words ^ place), dtype=jnp.uint32)
    return found


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits under which sums of differences do not cancel, signs included."""
    x = (x ^ (x >> np.uint32(16))) * _MIX[0]
    x = (x ^ (x >> np.uint32(15))) * _MIX[1]
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of an array as uint32 arrays of its shape."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    bits = x.dtype.itemsize * 8
    unsigned = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    if bits == 64:
        return [(unsigned & 0xFFFFFFFF).astype(jnp.uint32), (unsigned >> 32).astype(jnp.uint32)]
    return [unsigned.astype(jnp.uint32)]


def _places(x: jax.Array) -> jax.Array:
    """A number for each entry, from its place in row-major order, split like the array."""
    places = jnp.uint32(0)
    for axis, size in enumerate(x.shape):
        if size > 1:
            stride = math.prod(x.shape[axis + 1 :])
            along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=out_sharding(x))
            places += along * np.uint32(stride * _POSITION & 0xFFFFFFFF)
    return places
