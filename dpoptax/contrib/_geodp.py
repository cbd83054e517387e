"""GeoDP as published, which is not private as stated, and a proven counterpart."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import UnitClip, clip_norm, positive
from dpoptax._random.keys import check_threefry_key
from dpoptax._random.tree_noise import standard_normal
from dpoptax._release.ledger import NoiseState, begin, checked_mechanism
from dpoptax._release.release import release
from dpoptax._support.tree import PyTree, float32_at_least, widen

UNPROVEN = (
    "GeoDP's noise on the angles shrinks with the batch size, but the angles of a mean gradient "
    "are not a mean: one example can turn a small mean gradient around by π, whatever the batch. "
    "Use dpoptax.contrib.hyperspherical_clip with dpoptax.gaussian_noise for a proven guarantee"
)


def geodp(
    beta: float, *, noise_multiplier: float, batch_size: float, key: jax.Array
) -> optax.GradientTransformation:
    """Adds GeoDP's noise to magnitude and angles of the mean gradient, as published.

        (‖ḡ‖, θ) of ḡ = Σ_ξ clip(g(ξ)) / B
        ‖ḡ‖* = ‖ḡ‖ + σC/B · n_0,    θ* = θ + σ√(d + 2)βπ/B · (n_1 … n_{d−1}),    n ~ N(0, 1)

    and converts back to rectangular coordinates. C is the sensitivity of the clip and d the number
    of parameters. Use it instead of `dpoptax.gaussian_noise`. Input: a `ClippedSum`. Output: a
    noisy mean, in the dtype of `params` if `update` gets them. The leaves are concatenated, so a
    sharded gradient is gathered.

    Privacy: no guarantee is stated, and `dpoptax.accounting` raises an error for this mechanism. It
    is here to reproduce the paper. With d = 20, B = 256, β = σ = 1, there are two neighboring
    batches whose mean gradients have first angles 0 and π, 54.6 standard deviations of the
    noise apart (docs/developers/methods.md).

    Args:
      beta: β in (0, 1], the paper's bounding factor, which scales the noise on the angles. It does
        not bound them, because the paper's region is around the private direction itself.
      noise_multiplier: σ.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.

    Raises:
      ValueError: β is outside (0, 1], the multiplier is negative or not finite, or the batch size
        is not positive. At `update`: there are fewer than two parameters.
      TypeError: the key is not a threefry key. At `update`: the gradients are not a `ClippedSum`,
        or its geometry has its own encoding.

    Source: Duan et al., "Analyzing and Optimizing Perturbation of DP-SGD Geometrically" (GeoDP),
    2025, Algorithm 1. Its Lemma 2 bounds a probability by 1 − β, which does not hold for any data.
    Its Theorem 5 takes the larger cost of two releases instead of composing them.

    >>> import jax
    >>> tx = geodp(0.1, noise_multiplier=1.0, batch_size=256, key=jax.random.key(0))
    """
    if not (isinstance(beta, (int, float)) and 0.0 < beta <= 1.0):
        raise ValueError(f"`beta` must be in (0, 1], got {beta!r}.")
    mechanism = checked_mechanism(noise_multiplier, batch_size, unproven=UNPROVEN)
    key = check_threefry_key(key)

    def init_fn(params: PyTree) -> NoiseState:
        return begin(mechanism, key, params)

    def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
        if clipped.clip.encodes:
            raise TypeError(
                "`geodp` computes angles itself and must not get encoded gradients, got "
                f"{clipped.clip}. Clip with `dpoptax.l2_clip`, or use `dpoptax.gaussian_noise` "
                "with this geometry."
            )
        flat, restore = _flatten(clipped.sum)
        if flat.size < 2:
            raise ValueError(f"`geodp` needs at least 2 parameters, got {flat.size}.")
        sigma, size = mechanism.noise_multiplier, mechanism.batch_size
        norm, angles = to_hyperspherical(flat / size)
        noise = sigma / size * standard_normal(step_key, flat.shape, flat.dtype)
        norm += clipped.clip.sensitivity * noise[0]
        angles += math.sqrt(flat.size + 2) * beta * math.pi * noise[1:]
        return restore(from_hyperspherical(norm, angles)), None

    def update_fn(
        updates: PyTree, state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        released, _, state = release(updates, state, params, mechanism, noisy_mean)
        return released, state

    return optax.GradientTransformation(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class HypersphericalClip(UnitClip):
    """Clipping geometry of `hyperspherical_clip`."""

    l2_clip_norm: float
    angle_norm: float | None
    beta: float | None
    magnitude_weight: float

    def encode(self, grads: PyTree, reference: PyTree) -> PyTree:
        """Returns u(g) in the shapes of the gradients, (B, …); NaN if one is not finite."""
        flat, restore = _flatten(grads, batched=True)
        norm, angles = to_hyperspherical(flat)
        if self.angle_norm is not None:
            length = jnp.linalg.norm(angles, axis=-1, keepdims=True)
            angles *= jnp.minimum(1.0, self.angle_norm / jnp.where(length > 0, length, 1.0))
        else:
            # The paper's ranges βπ and 2βπ, halved because they are centered.
            box = self._beta_pi * jnp.full((1, angles.shape[-1]), 0.5).at[:, -1:].set(1.0)
            angles = jnp.clip(angles, -box, box)
        # A zero gradient has no direction, but one of negative zeros has an azimuth of −π.
        angles = jnp.where((norm != 0)[:, None], angles, 0.0)
        magnitude, angle = self._scales(flat.shape[-1])
        bounded = jnp.clip(norm, -self.l2_clip_norm, self.l2_clip_norm)
        encoded = jnp.concatenate([bounded[:, None] / magnitude, angles / angle], axis=-1)
        finite = jnp.all(jnp.isfinite(flat), axis=-1, keepdims=True)
        return restore(jnp.where(finite, encoded, jnp.nan))

    def decode(self, mean: PyTree, reference: PyTree) -> PyTree:
        """Returns the gradient with the magnitude and angles of the noisy mean."""
        flat, restore = _flatten(mean)
        magnitude, angle = self._scales(flat.size)
        norm, angles = magnitude * flat[0], angle * flat[1:]
        if flat.size > 1:
            norm = jnp.maximum(norm, 0.0)
        return restore(from_hyperspherical(norm, angles))

    @property
    def _beta_pi(self) -> float:
        return math.pi * (self.beta or 0.0)

    def _scales(self, dimension: int) -> tuple[float, float]:
        """Returns the size of one unit of u, (C/λ, ρ/√(1 − λ²))."""
        radius = self.angle_norm
        if radius is None:
            radius = self._beta_pi * math.sqrt(dimension + 2) / 2
        weight = self.magnitude_weight
        return self.l2_clip_norm / weight, radius / math.sqrt(1.0 - weight**2)


def hyperspherical_clip(
    l2_clip_norm: float,
    *,
    angle_norm: float | None = None,
    beta: float | None = None,
    magnitude_weight: float = 0.1,
) -> HypersphericalClip:
    """Clips each example's magnitude and hyperspherical angles; GeoDP with a proof.

        u(g) = (λ min(‖g‖, C)/C,  √(1 − λ²) clip(ψ(g))/ρ),    ‖u(g)‖ ≤ 1

    ψ are the hyperspherical angles measured from the equator. They are clipped to l2 norm ρ =
    `angle_norm`, or to the box of half-widths βπ/2, …, βπ/2, βπ, whose corner is at ρ =
    √(d + 2)βπ/2. With β = 1 the box does not clip. `dpoptax.gaussian_noise` adds σN(0, I) to the
    sum of the u, divides by B, and decodes the mean encoding to a gradient.

    Privacy: one example changes the sum by at most 1 in l2 norm, so the guarantee is that of DP-SGD
    at the same noise multiplier. An example whose gradient is not finite adds exactly zero.

    Use it to study angles, and `l2_clip` to train. The mean of the angles is not the angle of the
    mean: for 256 examples of 500 parameters at σ = 1, the release has cosine 0.58 with the true
    gradient at the best ρ, against 0.95 with `l2_clip` (experiments/results/REPRODUCTION.md). This
    clip needs the memory of per-example gradients.

    Args:
      l2_clip_norm: C, the largest magnitude.
      angle_norm: ρ in radians. Pass either this or `beta`.
      beta: β in (0, 1], the paper's box.
      magnitude_weight: λ in (0, 1). The noise on the magnitude is σC/(λB), and that on each angle
        σρ/(√(1 − λ²)B).

    Raises:
      ValueError: a number is out of range, or not exactly one of `angle_norm` and `beta` is given.

    >>> hyperspherical_clip(1.0, angle_norm=2.0).sensitivity
    1.0
    """
    if (angle_norm is None) == (beta is None):
        raise ValueError(
            "Exactly one of `angle_norm` and `beta` must be given, got "
            f"angle_norm={angle_norm}, beta={beta}."
        )
    if beta is not None and not 0.0 < positive("beta", beta) <= 1.0:
        raise ValueError(f"`beta` must be in (0, 1], got {beta}.")
    if positive("magnitude_weight", magnitude_weight) >= 1.0:
        raise ValueError(f"`magnitude_weight` must be in (0, 1), got {magnitude_weight}.")
    return HypersphericalClip(
        clip_norm("l2_clip_norm", l2_clip_norm),
        None if angle_norm is None else positive("angle_norm", angle_norm),
        None if beta is None else float(beta),
        float(magnitude_weight),
    )


def to_hyperspherical(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Converts rectangular to hyperspherical coordinates.

    GeoDP (Duan et al. 2025), eq. (24)–(26), with the first d - 2 angles measured from the equator,
    ψ_z = π/2 - θ_z:

        ‖v‖ = √(Σ_z v_z²),
        ψ_z = arctan2(v_z, √(Σ_{i>z} v_i²))   for z ≤ d - 2, in [-π/2, π/2],
        ψ_{d-1} = θ_{d-1} = arctan2(v_d, v_{d-1})   in [-π, π].

    In high dimension all θ_z are close to π/2, where float32 resolves only 1e-7. At d = 10⁶ this is
    an error of 2e-5 in the direction. ψ_z is close to 0 and keeps its relative accuracy.

    The tail norms are a reverse cumulative sum of squares, without a sequential loop. Squaring v /
    max|v| cannot overflow, and values that underflow are below rounding.

    Args:
      v: shape (..., d), d ≥ 1. In one dimension the norm carries the sign.

    Returns:
      The norm, shape (...), and the angles, shape (..., d - 1), in float32 or wider. The zero
      vector has norm 0 and angles 0.
    """
    v = widen(v)
    if v.shape[-1] == 0:
        raise ValueError(f"The last axis of `v` must not be empty, got shape {v.shape}.")
    if v.shape[-1] == 1:
        return v[..., 0], v[..., :0]
    largest = jnp.max(jnp.abs(v), axis=-1, keepdims=True)
    scaled = v / jnp.where(largest > 0, largest, 1)
    sums = lax.cumsum(scaled**2, axis=v.ndim - 1, reverse=True)
    norm = largest[..., 0] * jnp.sqrt(sums[..., 0])
    elevations = jnp.arctan2(scaled[..., :-2], jnp.sqrt(sums[..., 1:-1]))
    azimuth = jnp.arctan2(scaled[..., -1:], scaled[..., -2:-1])
    return norm, jnp.concatenate([elevations, azimuth], axis=-1)


def from_hyperspherical(norm: jax.Array, angles: jax.Array) -> jax.Array:
    """Converts hyperspherical to rectangular coordinates.

    GeoDP eq. (27), with angles from the equator, the inverse of `to_hyperspherical`:

        v_z = ‖v‖ sin ψ_z Π_{i<z} cos ψ_i   for z ≤ d - 2,
        (v_{d-1}, v_d) = ‖v‖ Π_{i≤d-2} cos ψ_i · (cos ψ_{d-1}, sin ψ_{d-1}).

    It accepts any real angles and norm, because noise can move them out of their ranges.

    The products are a cumulative sum of logarithms, with separate signs. A running product of a
    million cosines, each rounded to 1 - k·6e-8, would accumulate the rounding errors.

    Args:
      norm: shape (...).
      angles: shape (..., d - 1).

    Returns:
      The vector, shape (..., d), in float32 or wider.
    """
    dtype = float32_at_least(norm, angles)
    norm, angles = norm.astype(dtype), angles.astype(dtype)
    if angles.shape[-1] == 0:
        return norm[..., None]
    elevations, azimuth = angles[..., :-1], angles[..., -1:]
    sin, cos = jnp.sin(elevations), jnp.cos(elevations)
    # For a zero tail the angle is π/2, rounded. Its cosine is 4e-8 in float32 instead of 0.
    cos = jnp.where(jnp.abs(cos) < jnp.finfo(dtype).eps / 2, 0.0, cos)
    # log|cos| is accurate through the sine for small angles, and directly for large ones.
    small = jnp.abs(sin) < 0.5
    logarithm = jnp.where(
        small, 0.5 * jnp.log1p(-(jnp.where(small, sin, 0.0) ** 2)), jnp.log(jnp.abs(cos))
    )
    axis = angles.ndim - 1
    odd = lax.cumsum((cos < 0).astype(jnp.int32), axis=axis) % 2
    products = jnp.exp(lax.cumsum(logarithm, axis=axis)) * (1 - 2 * odd).astype(dtype)
    ones = jnp.ones_like(azimuth)
    products = jnp.concatenate([ones, products], axis=-1)
    last = products[..., -1:]
    return norm[..., None] * jnp.concatenate(
        [products[..., :-1] * sin, last * jnp.cos(azimuth), last * jnp.sin(azimuth)], axis=-1
    )


def _flatten(
    tree: PyTree, batched: bool = False
) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """Returns all leaves as one array, in float32 or wider, and the inverse function."""
    leaves, treedef = jax.tree.flatten(tree)
    lead = leaves[0].shape[:1] if batched else ()
    sizes = [math.prod(leaf.shape[len(lead) :]) for leaf in leaves]
    columns = [widen(leaf).reshape(*lead, size) for leaf, size in zip(leaves, sizes, strict=True)]

    def restore(flat: jax.Array) -> PyTree:
        ends = list(itertools.accumulate(sizes))[:-1]
        columns = jnp.split(flat, ends, axis=-1)
        return jax.tree.unflatten(
            treedef,
            [column.reshape(leaf.shape) for column, leaf in zip(columns, leaves, strict=True)],
        )

    return jnp.concatenate(columns, axis=-1), restore
