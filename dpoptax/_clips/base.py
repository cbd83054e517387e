"""Clip geometries, and the sum of clipped per-example gradients: what bounds the sensitivity."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clips import bounds
from dpoptax._clips.clipped_sum import ClippedSum as ClippedSum
from dpoptax._clips.clipped_sum import assert_clipped


class Clip(abc.ABC):
    """How a per-example gradient is bounded. Subclasses are frozen dataclasses: static, hashable.

    A geometry cuts the gradient's leaves into groups, and scales each group by a factor of its l2
    norms, so that the whole has l2 norm at most `sensitivity`, for every input. One that bounds
    something else than a scaled gradient encodes it first, and decodes the noisy mean.

    Attributes:
      encodes: whether `encode` is more than the identity.
      by_norms: whether each gradient's norm is all that `encode` needs, as `scaling`, `statistic`
        and `join` say; if not, and `encodes`, per-example gradients are needed.
      followed: whether the reference is kept by a noise stage of the geometry's own.
    """

    encodes: ClassVar[bool] = False
    by_norms: ClassVar[bool] = False
    followed: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """The largest l2 norm that one example can add to a `ClippedSum`."""

    @abc.abstractmethod
    def factors(self, norms: jax.Array) -> jax.Array:
        """Maps float32 norms of shape (…, groups), all positive, to factors of the same shape."""

    def groups(self, tree: Any) -> list[int]:
        """The group of each leaf of `tree`, in the order of `jax.tree.leaves`; one group here."""
        return [0] * len(jax.tree.leaves(tree))

    def encode(self, grads: Any, reference: Any) -> Any:
        """What is scaled and summed in place of the gradients, leaves (B, …); they themselves here.

        Not finite where an example's gradient is not. `reference` is public.
        """
        del reference
        return grads

    def scaling(self, reference: Any) -> "Clip":
        """The geometry whose factors `encode` scales gradients by, at a reference; itself here."""
        del reference
        return self

    def statistic(self, norms: jax.Array, reference: Any) -> jax.Array | None:
        """What `encode` puts beside each gradient, (B,), from its norm, (B,); nothing here."""
        del norms, reference
        return None

    def join(self, gradient: Any, statistic: Any) -> Any:
        """Sums of scaled gradients and of statistics as the sum that `encode` makes."""
        del statistic
        return gradient

    def decode(self, mean: Any, reference: Any) -> Any:
        """The gradient, shaped like the parameters, that the noisy mean encodes; itself here."""
        del reference
        return mean


class UnitClip(Clip):
    """Base of geometries that encode each gradient as a vector of l2 norm at most 1."""

    encodes: ClassVar[bool] = True

    @property
    def sensitivity(self) -> float:
        """1: the bound on what `encode` makes, whatever it is made of."""
        return 1.0

    def factors(self, norms: jax.Array) -> jax.Array:
        """Takes off what rounding put on top of 1."""
        return jnp.minimum(1.0, 1.0 / norms)


@dataclasses.dataclass(frozen=True)
class L2Clip(Clip):
    """min(1, C/‖g‖) g; see `l2_clip`."""

    l2_clip_norm: float

    @property
    def sensitivity(self) -> float:
        """C."""
        return self.l2_clip_norm

    def factors(self, norms):
        """min(1, C/‖g‖)."""
        return jnp.minimum(1.0, self.l2_clip_norm / norms)


def l2_clip(l2_clip_norm: float) -> L2Clip:
    """Clips each example's whole gradient to an l2 norm: g ↦ min(1, C/‖g‖) g.

    Privacy: one example adds at most C = `l2_clip_norm` to the sum, in l2 norm. An example with a
    non-finite gradient adds exactly zero.

    Args:
      l2_clip_norm: C, in the units of the gradient of one example's loss.

    Raises:
      ValueError: `l2_clip_norm` is not a positive, finite number.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1.

    >>> l2_clip(1.0).sensitivity
    1.0
    """
    return L2Clip(positive("l2_clip_norm", l2_clip_norm))


def positive(name: str, value: Any) -> float:
    """Returns `value` as a float, or raises with its name where it is no positive number."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced array: it is part of the privacy claim, so it must be a Python "
            "number, fixed before jit"
        )
    value = float(value)
    if not (math.isfinite(value) and 0.0 < value <= 1e9):
        raise ValueError(f"{name}={value}: want a number in (0, 1e9]")
    return value


def clip_per_example(clip: Clip) -> optax.GradientTransformation:
    """Clips per-example gradients and sums them: leaves (B, …) become a `ClippedSum` of leaves (…).

    The first half of `clip_and_noise`, for who wants to look between the two. Privacy: none yet;
    the sum is private data until noise is added.

    Args:
      clip: the geometry, such as `l2_clip(1.0)`.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      TypeError: `clip` is no geometry.
      ValueError: `clip` is `adaptive_clip`, whose threshold this stage cannot know; at `update`,
        leaves whose leading axes, the examples, disagree.

    >>> import jax.numpy as jnp
    >>> tx = clip_per_example(l2_clip(1.0))
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> clipped, _ = tx.update(grads, tx.init({"w": jnp.zeros(2)}))
    >>> clipped.sum["w"]
    Array([0.899..., 1.199...], dtype=float32)
    """
    if check_clip(clip).followed:
        raise ValueError(
            f"clip={clip} follows a threshold that only its own noise stage knows: take gradients "
            "with dpoptax.clipped_grad, and dpoptax.adaptive_gaussian_noise behind it"
        )

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None):
        del params
        return assert_clipped(sum_clipped(clip, updates), clip), state

    return optax.GradientTransformation(init_fn, update_fn)


def check_clip(clip: Any) -> Clip:
    """Returns `clip`, or raises where it is not a clip geometry."""
    if not isinstance(clip, Clip):
        raise TypeError(f"clip={clip!r}: want a clip geometry such as dpoptax.l2_clip(1.0)")
    return clip


def sum_clipped(
    clip: Clip,
    grads: Any,
    mask: jax.Array | None = None,
    reference: Any = None,
    *,
    grid: float | None = None,
) -> Any:
    """Σ_i mask_i clip(grads_i), for leaves (B, …); non-finite and masked examples add exactly zero.

    By formed gradients: what is summed is what was measured. With a grid, a power of two, each
    summand is rounded to whole multiples of it, and the sum is of these integers: it is exact.
    """

    def summed(coefficient, unit):
        if grid is None:
            return jnp.einsum("b,b...->...", coefficient, unit, precision=jax.lax.Precision.HIGHEST)
        clipped = coefficient.reshape((-1,) + (1,) * (unit.ndim - 1)) * unit
        return jnp.sum(jnp.rint(clipped / grid).astype(jnp.int32), axis=0)

    grads = clip.encode(grads, reference)
    clipped = clip_each(clip, grads, mask)
    sums = list(map(summed, clipped.coefficients, clipped.units))
    return jax.tree.unflatten(jax.tree.structure(grads), sums)


class ClippedUnits(NamedTuple):
    """Per-example gradients, apart from what they are multiplied by.

    Attributes:
      units: leaves (B, …) of gradients over powers of two, float32 at least.
      coefficients: (leaves, B); their products with the units are the clipped gradients.
      norms: (B,), of whole gradients where the geometry has one group.
      used: (B,), which examples are finite and not masked.
    """

    units: list[jax.Array]
    coefficients: jax.Array
    norms: jax.Array
    used: jax.Array


def clip_each(clip: Clip, grads: Any, mask: jax.Array | None = None) -> ClippedUnits:
    """Clips formed gradients, leaves (B, …), by upper bounds of their norms; see `_bounds`."""
    batch = batch_axis(grads)
    check_real(grads)
    mask = jnp.ones(batch, bool) if mask is None else mask
    pieces = [bounds.formed_size(leaf) for leaf in jax.tree.leaves(grads)]
    coefficients, norms, used = bounds.coefficients(
        clip,
        bounds.stack([size for _, size in pieces]),
        clip.groups(grads),
        mask,
        sum_error=0.0,
    )
    return ClippedUnits([unit for unit, _ in pieces], coefficients, norms, used)


def check_real(tree: Any) -> None:
    """Raises where a leaf is complex: a clip bound is stated for real coordinates."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            raise TypeError(
                f"leaf {jax.tree_util.keystr(path) or 'the gradient'} is {jnp.result_type(leaf)}: "
                "gradients are clipped and noised in real coordinates; hold real and imaginary "
                "part as two real arrays and combine them in the loss"
            )


def batch_axis(tree: Any) -> int:
    """The length of the leading axis that all leaves share; raises where they do not."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = {jax.tree_util.keystr(path): jnp.shape(leaf)[:1] for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(
            "every leaf must have the examples as its leading axis, of one length; got "
            + ", ".join(f"{name or 'leaf'}: {size}" for name, size in sizes.items())
        )
    return next(iter(sizes.values()))[0]
