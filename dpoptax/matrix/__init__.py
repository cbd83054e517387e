"""Noise that is correlated over steps: strategies, the sampler that fits, and what both cost.

A strategy is a lower-triangular Toeplitz matrix C over the steps. In place of independent noise Z,
`dpoptax.correlated_noise` adds C⁻¹Z to the clipped sums: the noise of one step is partly taken back
by the next ones, so that less of it is left in the sum of all gradients, which is what SGD's
parameters are. Written as C⁻¹(C G + Z), the whole run is one Gaussian mechanism on C G, whose
sensitivity depends on the steps in which an example can take part: on the sampler. That is why ε is
stated for a strategy and a sampler together, `strategy.under(sampler)`, and refused where they do
not fit.

The optimisation of strategies, their sensitivities and their noise are jax_privacy's: install
`dpoptax[matrix]`. Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", 2023;
McMahan, Xu, Zhang, "A Hassle-free Algorithm for Strong Differential Privacy in Federated Learning
Systems", 2024, for the buffered Toeplitz matrices; Kalinin et al., "Back to Square Roots", 2025,
for strategies whose inverse is banded, and whose noise needs no memory.
"""

from dpoptax.matrix._inverse_strategies import BandedInverseToeplitz as BandedInverseToeplitz
from dpoptax.matrix._inverse_strategies import (
    banded_inverse_square_root as banded_inverse_square_root,
)
from dpoptax.matrix._participation import Participation as Participation
from dpoptax.matrix._strategies import BandedToeplitz as BandedToeplitz
from dpoptax.matrix._strategies import BufferedToeplitz as BufferedToeplitz
from dpoptax.matrix._strategies import Strategy as Strategy
from dpoptax.matrix._strategies import optimal_banded_toeplitz as optimal_banded_toeplitz
from dpoptax.matrix._strategies import optimal_buffered_toeplitz as optimal_buffered_toeplitz
from dpoptax.sampling._cyclic import CyclicPoissonSampler as CyclicPoissonSampler
