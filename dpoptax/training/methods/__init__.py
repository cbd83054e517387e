"""Defines the methods for configs."""

from dpoptax.training.methods.filters import PMLF, AdaptiveKalman, Disk, Doppler
from dpoptax.training.methods.method import DPSGD, Method, NonPrivate
from dpoptax.training.methods.releases import AdaptiveClip, CorrelatedNoise, LPAdam

__all__ = [
    "AdaptiveClip", "AdaptiveKalman", "CorrelatedNoise", "DPSGD", "Disk", "Doppler", "LPAdam",
    "Method", "NonPrivate", "PMLF",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
