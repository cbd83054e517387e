"""DOPPLER within Adam: the filter is the first moment, the second moment is of what comes in."""

import dataclasses
from typing import ClassVar

import optax
import optax.contrib

import dpoptax
from dpoptax.training.methods import Doppler, coefficients


@dataclasses.dataclass(frozen=True)
class LPAdam(Doppler):
    """DOPPLER's Algorithm 3; it is the optimizer too, so a config has `optimizer="sgd"` with it.

    With the preset "momentum" it is Adam without DOPPLER, and with `noise_corrected` DP-AdamBC.
    """

    name: ClassVar[str] = "LP-Adam"

    noise_corrected: bool = False
    """Whether the noise's known variance is taken off the second moment (Tang et al., 2024)."""
    rank: int | None = None
    """Rank of GaLore's projection of each matrix; None: no projection."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Filter, second moment and their quotient, projected if there is a rank."""
        b, a = coefficients(self)
        adam = dpoptax.scale_by_lp_adam(b, a, stddev=stddev if self.noise_corrected else 0.0)
        if self.rank is None:
            return adam
        return optax.contrib.scale_by_galore(self.rank, base_optimizer=adam)
