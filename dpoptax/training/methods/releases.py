"""Defines methods that replace the clip, the noise or the optimizer."""

import dataclasses
import functools
from typing import ClassVar

import optax
import optax.contrib

import dpoptax
from dpoptax.matrix import Strategy, optimal_banded_toeplitz
from dpoptax.training.errors import ConfigError
from dpoptax.training.methods.filters import Doppler, coefficients
from dpoptax.training.methods.method import Method
from dpoptax.training.roles import Role, field


@dataclasses.dataclass(frozen=True)
class AdaptiveClip(Method):
    """Clip norm that tracks a quantile of the gradient norms (Andrew et al., 2021).

    It starts at the config's clip norm. Each release includes the noisy count that estimates
    the quantile.
    """

    name: ClassVar[str] = "Adaptive clip"
    adaptive: ClassVar[bool] = True

    quantile: float = 0.5
    """Target fraction of examples with unclipped gradients, in [0, 1]."""
    clip_rate: float = 0.2
    """A step changes the clip norm by a factor of at most about exp(clip_rate)."""
    count_share: float = 0.01
    """Fraction of the privacy cost spent on the count, in (0, 1)."""

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip:
        """Returns the geometry, whichever clip the config names."""
        return dpoptax.contrib.adaptive_clip(
            l2_clip_norm,
            quantile=self.quantile,
            learning_rate=self.clip_rate,
            count_share=self.count_share,
        )


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise(Doppler):
    """Correlated noise, which later steps partly cancel, followed by DOPPLER's filter.

    It needs `sampling="cyclic"`, with as many groups as bands, or "in_order", with at least as many
    batches per epoch as bands. With `accountant="monte_carlo"`, it also supports "balls_in_bins",
    "min_separation" and "random_allocation".
    """

    name: ClassVar[str] = "Correlated noise"

    preset: str = field("none", Role.UNPRICED)
    """Name of the filter, see dpoptax.filters.presets."""
    bands: int = 4
    """Number of successive steps over which noise is correlated. 1: independent noise."""

    @property
    def cycle_length(self) -> int:
        """Number of bands. No example takes part twice within so many steps."""
        return self.bands

    def strategy(self, steps: int) -> Strategy:
        """Returns the strategy with the least error of the sum of all gradients."""
        try:
            return _optimal_strategy(steps, self.bands)
        except ImportError as error:
            raise ConfigError(f"method={self.name} needs an optional package. {error}") from error


@dataclasses.dataclass(frozen=True)
class LPAdam(Doppler):
    """Adam with DOPPLER's filter as first moment (Zhang et al., 2024, Algorithm 3)."""

    name: ClassVar[str] = "LP-Adam"

    b2: float = 0.999
    """Decay of the second moment of the unfiltered gradient, in [0, 1)."""
    noise_corrected: bool = False
    """Whether to subtract the noise variance from the second moment, as DP-AdamBC does."""
    rank: int | None = None
    """Rank of GaLore's projection of each matrix. None: no projection."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the identity, because Adam contains the filter."""
        del stddev
        return optax.identity()

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """Returns Adam, in the projected space if `rank` is given."""
        known = stddev if self.noise_corrected else 0.0
        adam = dpoptax.extend.scale_by_lp_adam(*coefficients(self), b2=self.b2, stddev=known)
        if self.rank is None:
            return adam
        return optax.contrib.scale_by_galore(self.rank, base_optimizer=adam)


@functools.cache
def _optimal_strategy(steps: int, bands: int) -> Strategy:
    return optimal_banded_toeplitz(steps, min(bands, steps))
