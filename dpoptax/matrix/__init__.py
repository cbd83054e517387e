"""Correlated noise: strategies, a sampler for them, and their privacy cost.

A strategy is a lower-triangular Toeplitz matrix A over the steps. Instead of independent noise Z,
`dpoptax.correlated_noise` adds A⁻¹Z to the clipped sums G. Later steps cancel a part of the noise
of earlier steps. So less noise remains in the sum of all gradients, and thus in SGD's parameters.

Since G + A⁻¹Z = A⁻¹(A G + Z), the whole run is one Gaussian mechanism on A G. Its sensitivity
depends on the steps in which an example can take part, and thus on the sampler. Therefore ε is
stated for a strategy with a sampler, `strategy.under(sampler)`. Combinations without a known ε
raise an error.

Strategies are optimized with jax_privacy, which also computes their noise: install
`dpoptax[matrix]`. Sources: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", 2023;
McMahan, Xu, Zhang, "A Hassle-free Algorithm for Strong Differential Privacy in Federated Learning
Systems", 2024, for buffered Toeplitz matrices.
"""

from dpoptax.matrix._participation import Participation, Strategy
from dpoptax.matrix._strategies import (
    BandedToeplitz,
    BufferedToeplitz,
    optimal_banded_toeplitz,
    optimal_buffered_toeplitz,
)
from dpoptax.sampling._cyclic import CyclicPoissonSampler

__all__ = [
    "BandedToeplitz", "BufferedToeplitz", "CyclicPoissonSampler", "Participation", "Strategy",
    "optimal_banded_toeplitz", "optimal_buffered_toeplitz",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
