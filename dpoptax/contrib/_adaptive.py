"""Clips to a threshold that follows a private quantile of gradient norms."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import Clip, UnitClip, clip_norm, positive
from dpoptax._points.points import ReferenceState
from dpoptax._random.keys import check_noise_key
from dpoptax._release.gaussian import noisy_mean_of
from dpoptax._release.ledger import NoiseState, begin, checked_mechanism
from dpoptax._release.release import release
from dpoptax._support.serialization import SerializableState
from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler

# Keeps the reciprocal of the threshold a normal float32.
_THRESHOLDS = (1e-9, 1e9)


class CountedGradient(NamedTuple):
    """Holds the encoding of one gradient by `QuantileClip`.

    Attributes:
      gradient: √(1 − ρ) clip(g/C_t), shaped like the parameters.
      count: √ρ if ‖g‖ ≤ C_t and −√ρ otherwise, a scalar.
    """

    gradient: PyTree
    count: jax.Array  # type: ignore[assignment]  # hides tuple.count


@dataclasses.dataclass(frozen=True)
class QuantileClip(UnitClip):
    """Encodes clipped gradients and counts; see `adaptive_clip`."""

    by_norms: ClassVar[bool] = True
    own_stage: ClassVar[str | None] = "dpoptax.contrib.adaptive_gaussian_noise"

    initial_l2_clip_norm: float
    quantile: float
    learning_rate: float
    count_share: float

    def scaling(self, reference: PyTree) -> "_ToThreshold":
        """Returns the scaling by √(1 − ρ) min(1/C_t, 1/‖g‖)."""
        return _ToThreshold(self._threshold(reference), math.sqrt(1.0 - self.count_share))

    def statistic(self, norms: jax.Array, reference: PyTree) -> jax.Array:
        """Returns √ρ for examples with ‖g‖ ≤ C_t and −√ρ for all others."""
        unclipped = norms <= self._threshold(reference)
        return math.sqrt(self.count_share) * jnp.where(unclipped, 1.0, -1.0)

    def join(self, gradient: PyTree, statistic: jax.Array | None) -> CountedGradient:
        """Returns the `CountedGradient` of a summed gradient and a summed count."""
        assert statistic is not None
        return CountedGradient(gradient, statistic)

    def decode(self, mean: CountedGradient, reference: PyTree) -> PyTree:
        """Multiplies the gradient by C_t/√(1 − ρ), to restore its units."""
        unit = self._threshold(reference) / math.sqrt(1.0 - self.count_share)
        return jax.tree.map(lambda m: unit * m, mean.gradient)

    def next_threshold(self, mean: CountedGradient, threshold: jax.Array) -> jax.Array:
        """Returns C_t exp(−η(b − γ)), with b the released fraction of unclipped examples."""
        # The mean of ±√ρ is √ρ (2b − 1).
        unclipped = 0.5 + mean.count / (2.0 * math.sqrt(self.count_share))
        step = jnp.exp(-self.learning_rate * (unclipped - self.quantile))
        return jnp.clip(threshold * step, *_THRESHOLDS).astype(threshold.dtype)

    def _threshold(self, reference: PyTree) -> jax.Array:
        if getattr(reference, "shape", None) != ():
            raise ValueError(
                f"`adaptive_clip` needs the threshold that `{self.own_stage}` keeps in its state. "
                "Use that stage, and call `grad_fn` with `dpoptax.gradient_points(opt_state, "
                "params)`. With another stage, such as `dpoptax.correlated_noise`, use a clip with "
                "a fixed bound, such as `dpoptax.l2_clip`."
            )
        return reference


@dataclasses.dataclass(frozen=True)
class _ToThreshold(Clip):
    """Scales to bound · min(1/C, 1/‖g‖) g with an array C."""

    threshold: jax.Array
    bound: float

    @property
    def sensitivity(self) -> float:
        return self.bound

    def factors(self, norms: jax.Array) -> jax.Array:
        # min(1/C, 1/‖g‖) = 1/max(C, ‖g‖).
        return self.bound / jnp.maximum(self.threshold, norms)


def adaptive_clip(
    initial_l2_clip_norm: float,
    *,
    quantile: float = 0.5,
    learning_rate: float = 0.2,
    count_share: float = 0.01,
) -> QuantileClip:
    """Clips to a threshold that follows a quantile of the per-example gradient norms.

        u(g) = (√(1 − ρ) min(1, C_t/‖g‖) g/C_t,  ±√ρ),    ‖u(g)‖ ≤ 1
        C_{t+1} = C_t exp(−η (b_t − γ))

    The sign is + if ‖g‖ ≤ C_t. b_t = 1/2 + Σ±1/(2B) + noise is the released fraction of unclipped
    examples, γ = `quantile`, η = `learning_rate`, and ρ = `count_share`. Add noise with
    `adaptive_gaussian_noise`, which keeps C_t. `gradient_points` passes C_t to `clipped_grad`.

    Privacy: one example changes the sum of the u by at most 1 in l2 norm. Gradient and count
    together therefore cost one release of the Gaussian mechanism with multiplier σ. ρ divides that
    cost between them: the gradient gets noise with multiplier σ/√(1 − ρ), and the sum of the
    centered counts gets noise with standard deviation σ_b = σ/(2√ρ). In the paper, z_Δ = (σ⁻² −
    (2σ_b)⁻²)^(−1/2) is the multiplier of the gradient. The recommended σ_b = B/20 corresponds to ρ
    = (10 σ/B)². An example whose gradient is not finite adds exactly zero.

    Args:
      initial_l2_clip_norm: C_0.
      quantile: γ in [0, 1], the target fraction of unclipped examples.
      learning_rate: η > 0. A step changes C_t by a factor between about exp(−η) and exp(η).
      count_share: ρ in (0, 1). Its square root is rounded to eight bits, so sums of up to 2¹⁶
        counts are exact.

    Raises:
      ValueError: a number is out of range. At the call: the points have no threshold.

    Source: Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021, Algorithm
    1 and Theorem 1.

    >>> adaptive_clip(0.1).sensitivity
    1.0
    """
    if not 0.0 <= quantile <= 1.0:
        raise ValueError(f"`quantile` must be in [0, 1], got {quantile}.")
    if not 0.0 < count_share < 1.0:
        raise ValueError(f"`count_share` must be in (0, 1), got {count_share}.")
    mantissa, exponent = math.frexp(math.sqrt(count_share))
    # √ρ with 8 bits, rounded down, so that sums of ±√ρ are exact (`Encoding.statistic`).
    count = math.ldexp(math.floor(mantissa * 2**8), exponent - 8)
    return QuantileClip(
        clip_norm("initial_l2_clip_norm", initial_l2_clip_norm),
        float(quantile),
        positive("learning_rate", learning_rate),
        # `math.sqrt` of this square is exactly the rounded √ρ.
        count**2,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptiveNoiseState(SerializableState):
    """Holds the state of `adaptive_gaussian_noise`.

    Attributes:
      noise: the state of the noise stage, with the ledger.
      threshold: C_t, a float32 scalar, stored where `gradient_points` finds it.
    """

    noise: NoiseState
    threshold: ReferenceState


def adaptive_gaussian_noise(
    clip: QuantileClip,
    *,
    noise_multiplier: float,
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
    sampler: "Sampler | None" = None,
) -> optax.GradientTransformation:
    """Adds Gaussian noise to the sum of an `adaptive_clip` and updates its threshold.

    Gradient and count get noise as one vector; see `adaptive_clip` for the formula. Input: the
    `ClippedSum` of `clip`. Output: the noisy mean gradient in its own units, in the dtype of
    `params` if `update` gets them.

    Privacy: each update is one release of the Gaussian mechanism with noise multiplier σ, including
    the count, and the ledger records it as such. The threshold is post-processing.

    Args:
      clip: the geometry that `clipped_grad` was given.
      noise_multiplier: σ, for gradient and count together. 0 adds no noise and gives ε = ∞.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.
      fixed_point: whether the guarantee holds for every bit of gradient, count and threshold; see
        `gaussian_noise`. The grid applies to g/C_t and does not depend on the threshold.
      sampler: as for `gaussian_noise`.

    Raises:
      TypeError: `clip` is not an `adaptive_clip`. At `update`: the gradients are not the
        `ClippedSum` of `clip`.
      ValueError, TypeError: as in `gaussian_noise`.

    >>> clip, key = adaptive_clip(0.1), jax.random.key(0)
    >>> tx = adaptive_gaussian_noise(clip, noise_multiplier=1.0, batch_size=8, key=key)
    >>> round(tx.init(jnp.zeros(2)).threshold.reference.item(), 2)
    0.1
    """
    if not isinstance(clip, QuantileClip):
        raise TypeError(f"`clip` must be a `dpoptax.contrib.adaptive_clip(...)`, got {clip!r}.")
    mechanism = checked_mechanism(noise_multiplier, batch_size, sampler, fixed_point=fixed_point)
    key = check_noise_key(key)

    def init_fn(params: PyTree) -> AdaptiveNoiseState:
        threshold = jnp.asarray(clip.initial_l2_clip_norm, jnp.float32)
        return AdaptiveNoiseState(begin(mechanism, key, params), ReferenceState(threshold))

    def update_fn(
        updates: PyTree, state: AdaptiveNoiseState, params: PyTree = None
    ) -> tuple[PyTree, AdaptiveNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
            return noisy_mean_of(clipped, mechanism, state.noise.count, step_key), None

        noise: Any = getattr(state, "noise", state)  # a state restored without a target has none
        released, (mean, _), noise = release(
            updates, noise, params, mechanism, noisy_mean, clip=clip
        )
        # `mean` is the released encoding before `decode`, so the threshold is post-processing.
        threshold = clip.next_threshold(mean, state.threshold.reference)
        return released, AdaptiveNoiseState(noise, ReferenceState(threshold))

    return optax.GradientTransformation(init_fn, update_fn)
