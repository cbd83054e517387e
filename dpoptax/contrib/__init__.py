"""Methods that did not improve accuracy in benchmarks, or that have no proven ε.

They follow the rules of the core: the clip bounds the sensitivity, noise is added once, and
everything after it is post-processing. `docs/results/index.md` compares them with the recommended
methods.
"""

from dpoptax.contrib._adam_bc import adam_bc
from dpoptax.contrib._adaptive import adaptive_clip, adaptive_gaussian_noise
from dpoptax.contrib._geodp import HypersphericalClip, geodp, hyperspherical_clip
from dpoptax.contrib._inner_outer import inner_outer
from dpoptax.contrib._psac import psac_clip

__all__ = [
    "HypersphericalClip", "adam_bc", "adaptive_clip", "adaptive_gaussian_noise",
    "geodp", "hyperspherical_clip", "inner_outer", "psac_clip",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
