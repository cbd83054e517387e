"""GeoDP as published, which is not private at the stated multiplier, and its proven counterpart."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dpoptax._clip.clip import UnitClip, clip_norm, positive
from dpoptax._clip.clipped_sum import ClippedSum
from dpoptax._noise.gaussian import GaussianNoiseState
from dpoptax._noise.ledger import Mechanism, begin, check_mechanism
from dpoptax._noise.release import release
from dpoptax._random.keys import check_threefry_key
from dpoptax._random.tree_noise import standard_normal
from dpoptax._tree import PyTree, widen
from dpoptax.contrib._coordinates import from_hyperspherical, to_hyperspherical

_UNPROVEN = (
    "GeoDP's noise on the angles shrinks with the batch size, but the angles of a mean gradient "
    "are not a mean: one example can turn a small mean gradient around by π, whatever the batch. "
    "Use dpoptax.contrib.hyperspherical_clip with dpoptax.gaussian_noise for a proven guarantee"
)


def geodp(
    beta: float, *, noise_multiplier: float, batch_size: float, key: jax.Array
) -> optax.GradientTransformation:
    """GeoDP's Algorithm 1 as published: noise on the magnitude and the angles of the mean gradient.

        (‖ḡ‖, θ) of ḡ = Σ_ξ clip(g(ξ)) / B
        ‖ḡ‖* = ‖ḡ‖ + σC/B · n_0,    θ* = θ + σ√(d + 2)βπ/B · (n_1 … n_{d−1}),    n ~ N(0, 1)

    and back to rectangular coordinates; C is the clip's sensitivity and d the number of parameters.
    It stands in the place of `dpoptax.gaussian_noise`: a `ClippedSum` in, a noisy mean out, in the
    dtype of `params` where `update` gets them. The leaves are concatenated, so a sharded gradient
    is gathered.

    Privacy: none is stated, and `dpoptax.accounting` refuses this mechanism. It is here to
    reproduce the paper. With d = 20, B = 256, β = σ = 1 there are two neighboring batches whose
    mean gradients have first angles 0 and π, 54 standard deviations of the noise apart.

    Args:
      beta: β in (0, 1], the paper's bounding factor. It scales the noise on the angles; it bounds
        no angle, for the region it speaks of lies around the private direction itself.
      noise_multiplier: σ.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.

    Raises:
      ValueError: β outside (0, 1], a negative or non-finite multiplier, a batch size that is not
        positive; at `update`, fewer than two parameters.
      TypeError: a key that is none of threefry; at `update`, gradients that are not a
        `ClippedSum`, or one whose geometry has an encoding of its own.

    Source: Duan et al., "Analyzing and Optimizing Perturbation of DP-SGD Geometrically" (GeoDP),
    2025, Algorithm 1. Its Lemma 2 bounds a probability by 1 − β that no data obeys, and its Theorem
    5 takes the larger of two releases in place of composing them.

    >>> import jax
    >>> tx = geodp(0.1, noise_multiplier=1.0, batch_size=256, key=jax.random.key(0))
    """
    if not (isinstance(beta, (int, float)) and 0.0 < beta <= 1.0):
        raise ValueError(f"beta={beta!r}: want a number in (0, 1]")
    noise_multiplier, batch_size = check_mechanism(noise_multiplier, batch_size)
    mechanism = Mechanism(noise_multiplier, batch_size, unproven=_UNPROVEN)
    key = check_threefry_key(key)

    def init_fn(params: PyTree) -> GaussianNoiseState:
        return GaussianNoiseState(**begin(mechanism, key, params))

    def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
        if clipped.clip.encodes:
            raise TypeError(
                f"geodp got gradients encoded by {clipped.clip}: it makes angles itself; clip with "
                "dpoptax.l2_clip, or use dpoptax.gaussian_noise with this geometry"
            )
        flat, restore = _flatten(clipped.sum)
        if flat.size < 2:
            raise ValueError(f"geodp got {flat.size} parameter(s): want at least two, for an angle")
        sigma, size = mechanism.noise_multiplier, mechanism.batch_size
        norm, angles = to_hyperspherical(flat / size)
        noise = sigma / size * standard_normal(step_key, flat.shape, flat.dtype)
        norm += clipped.clip.sensitivity * noise[0]
        angles += math.sqrt(flat.size + 2) * beta * math.pi * noise[1:]
        return restore(from_hyperspherical(norm, angles)), None

    def update_fn(
        updates: PyTree, state: GaussianNoiseState, params: PyTree = None
    ) -> tuple[PyTree, GaussianNoiseState]:
        released, _, state = release(updates, state, params, mechanism, noisy_mean)
        return released, state

    return optax.GradientTransformation(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class HypersphericalClip(UnitClip):
    """Bounded magnitude and angles of each example's gradient; see `hyperspherical_clip`."""

    l2_clip_norm: float
    angle_norm: float | None
    beta: float | None
    magnitude_weight: float

    def encode(self, grads: PyTree, reference: PyTree) -> PyTree:
        """u(g) in the shapes of the gradients, leaves (B, …); NaN for a gradient with one."""
        flat, restore = _flatten(grads, batched=True)
        norm, angles = to_hyperspherical(flat)
        offsets = _wrap(angles - jnp.broadcast_to(self._origin(reference), angles.shape))
        if self.angle_norm is not None:
            length = jnp.linalg.norm(offsets, axis=-1, keepdims=True)
            offsets *= jnp.minimum(1.0, self.angle_norm / jnp.where(length > 0, length, 1.0))
        else:
            # The paper's ranges βπ and 2βπ, halved as they are centred.
            box = self._beta_pi * jnp.full((1, offsets.shape[-1]), 0.5).at[:, -1:].set(1.0)
            offsets = jnp.clip(offsets, -box, box)
        # A zero gradient points nowhere: it pulls the mean neither to the equator nor elsewhere.
        offsets = jnp.where((norm != 0)[:, None], offsets, 0.0)
        magnitude, angle = self._scales(flat.shape[-1])
        bounded = jnp.clip(norm, -self.l2_clip_norm, self.l2_clip_norm)
        encoded = jnp.concatenate([bounded[:, None] / magnitude, offsets / angle], axis=-1)
        finite = jnp.all(jnp.isfinite(flat), axis=-1, keepdims=True)
        return restore(jnp.where(finite, encoded, jnp.nan))

    def decode(self, mean: PyTree, reference: PyTree) -> PyTree:
        """The gradient whose magnitude and angles the noisy mean encoding says."""
        flat, restore = _flatten(mean)
        magnitude, angle = self._scales(flat.size)
        norm, angles = magnitude * flat[0], angle * flat[1:] + self._origin(reference)
        if flat.size > 1:
            norm = jnp.maximum(norm, 0.0)
        return restore(from_hyperspherical(norm, angles))

    def _origin(self, reference: PyTree) -> jax.Array | float:
        """The angles that offsets are measured from; the equator where there is no direction."""
        return 0.0 if reference is None else to_hyperspherical(_flatten(reference)[0])[1]

    @property
    def _beta_pi(self) -> float:
        return math.pi * (self.beta or 0.0)

    def _scales(self, dimension: int) -> tuple[float, float]:
        """What a full unit of u means: (C/λ, ρ/√(1 − λ²))."""
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
    """GeoDP with a proof: bounds each example's magnitude and angles, to be noised as they are.

        u(g) = (λ min(‖g‖, C)/C,  √(1 − λ²) clip(ψ(g) − ψ_ref)/ρ),    ‖u(g)‖ ≤ 1

    ψ are the hyperspherical angles, counted from the equator, and ψ_ref is public: the equator, or
    with `dpoptax.extend.track_reference` in the optimizer the direction of the last release. The
    offset is clipped to l2 norm ρ = `angle_norm`, or to the box of half-widths βπ/2, …, βπ/2, βπ,
    whose corner is at ρ = √(d + 2)βπ/2; β = 1 and the equator clip nothing.
    `dpoptax.gaussian_noise` adds σN(0, I) to the sum of the u, divides by B, and decodes the mean
    encoding to a gradient.

    Privacy: one example adds at most 1 to the sum, in l2 norm, so the guarantee is that of DP-SGD
    at the same noise multiplier. An example with a non-finite gradient adds exactly zero.

    What it buys: nothing that was found. The mean of the examples' angles is not the angle of their
    mean: averaging pulls the angles to the reference, and from the equator what the first
    coordinates lose in length the last two receive. For 256 examples of 500 parameters at σ = 1,
    the release's cosine with the true gradient is 0.58 at the best ρ and 0.60 without any noise,
    where `l2_clip` has 0.95; the paper's box at β = 1 has 0.08. In the repository,
    `python -m experiments study release-cosines` measures them.
    A reference keeps its own direction and learns little. It also needs per-example gradients, with
    their memory. Take it to study angles, and `l2_clip` to train.

    Args:
      l2_clip_norm: C, the largest magnitude.
      angle_norm: ρ in radians, or
      beta: β in (0, 1], the paper's box; one of the two.
      magnitude_weight: λ in (0, 1): the noise on the magnitude is σC/(λB), that on each angle
        σρ/(√(1 − λ²)B).

    Raises:
      ValueError: a number outside its range, or not exactly one of `angle_norm` and `beta`.

    >>> hyperspherical_clip(1.0, angle_norm=2.0).sensitivity
    1.0
    """
    if (angle_norm is None) == (beta is None):
        raise ValueError(f"angle_norm={angle_norm}, beta={beta}: give exactly one of the two")
    if beta is not None and not 0.0 < positive("beta", beta) <= 1.0:
        raise ValueError(f"beta={beta}: want a number in (0, 1]")
    if positive("magnitude_weight", magnitude_weight) >= 1.0:
        raise ValueError(f"magnitude_weight={magnitude_weight}: want a number in (0, 1)")
    return HypersphericalClip(
        clip_norm("l2_clip_norm", l2_clip_norm),
        None if angle_norm is None else positive("angle_norm", angle_norm),
        None if beta is None else float(beta),
        float(magnitude_weight),
    )


def _wrap(offsets: jax.Array) -> jax.Array:
    """The azimuth, the last angle, runs around: its offset is taken into [−π, π)."""
    last = jnp.mod(offsets[..., -1:] + math.pi, 2 * math.pi) - math.pi
    return jnp.concatenate([offsets[..., :-1], last], axis=-1)


def _flatten(
    tree: PyTree, batched: bool = False
) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """One array of all leaves, in float32 at least, and the function that cuts it up again."""
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
