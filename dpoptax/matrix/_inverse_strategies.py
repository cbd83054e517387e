"""Strategies whose inverse has few bands, so noise is drawn again, not stored."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dpoptax.matrix._participation import Strategy
from dpoptax.matrix._strategies import checked_coefficients, stable_key


@dataclasses.dataclass(frozen=True)
class BandedInverseToeplitz(Strategy):
    """Strategy A whose inverse has b diagonals.

        (A⁻¹Z)_t = ‖A e_1‖ Σ_{i<b} d_i Z_{t−i}

    `correlated_noise` draws Z_{t−1}, …, Z_{t−b+1} again from their keys. So its state contains no
    copy of the parameters, for any number of bands, and each step draws b times. (1, −λ) is
    DP-λCGD, whose noise subtracts a share λ of the previous Z.

    A itself has all diagonals, so Poisson sampling does not amplify it. Use a
    `CyclicPoissonSampler` with cycle_length · batch_size = dataset_size, a
    `RandomAllocationSampler` or a `MinSeparationSampler`; other samplers raise an error. A is
    normalized so that its first column has l2 norm 1 over `steps` steps; a longer run is not
    accounted for.

    Attributes:
      coefficients: d_0, d_1, …, d_{b−1}, with d_0 > 0; only their ratios matter.
      steps: the length of the run.

    Raises:
      ValueError: coefficients are missing or not finite, d_0 or `steps` is not positive, or A has
        entries that are negative or increase along a column, for which no sensitivity is known.

    Source: Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private
    Model Training", 2024, Theorem 2, for the sensitivity of an A that decreases along its columns.
    See `banded_inverse_square_root` for the coefficients of a square root.

    >>> strategy = BandedInverseToeplitz((1.0, -0.5), steps=3)
    >>> (strategy.column(3) / strategy.column(3)[0]).tolist()
    [1.0, 0.5, 0.25]
    """

    coefficients: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        d = checked_coefficients(self.coefficients)
        if self.steps < 1:
            raise ValueError(
                f"`steps` must be at least 1, got {self.steps}. Pass the length of the run."
            )
        object.__setattr__(self, "coefficients", tuple((d / d[0]).tolist()))
        column = self.column(self.steps)
        if column.min() < 0.0 or np.diff(column).max(initial=0.0) > 0.0:
            raise ValueError(
                "`coefficients` must give columns of A, 1/Σ d_i zⁱ, that are nonnegative and do "
                f"not rise, got {self.coefficients}. No sensitivity is known for others. Pass "
                "(1, -λ) with λ in [0, 1], or use `banded_inverse_square_root`."
            )

    @property
    def bands(self) -> int | None:
        """None, since A has all diagonals; 1 for independent noise."""
        return None if any(self.coefficients[1:]) else 1

    @property
    def checkpoint_key(self) -> str:
        return stable_key("banded_inverse_toeplitz/1", self.steps, *self.coefficients)

    def column(self, steps: int) -> np.ndarray:
        """Returns the first column of A over `steps` steps.

        It is computed from the rounded weights, with which the noise is generated.
        """
        if steps > self.steps:
            raise ValueError(
                f"The strategy was made for {self.steps} steps, not for {steps}. Make another."
            )
        weights = self._weights.astype(float)
        return reciprocal(weights / weights[0], self.steps)[:steps] / weights[0]

    def noising_matrix(self) -> tuple[float, ...]:
        """Returns ‖A e_1‖ d_i, the weight of Z_{t−i} in the noise of step t, rounded to float32."""
        return tuple(self._weights.tolist())

    @property
    def _weights(self) -> np.ndarray:
        norm = np.linalg.norm(reciprocal(self.coefficients, self.steps))
        return (norm * np.asarray(self.coefficients)).astype(np.float32)


def banded_inverse_square_root(steps: int, bands: int) -> BandedInverseToeplitz:
    """Returns the banded inverse square root (BISR): b coefficients of √(1 − z).

        d_0 = 1,  d_i = d_{i−1} (i − 3/2)/i:    1, −1/2, −1/8, −1/16, …

    Let S be the lower-triangular matrix of ones, which sums over steps. The strategy √S has an
    error of the noisy sums that is optimal up to constants if every example takes part once. With
    b bands of its inverse, this holds if examples take part every b steps. One band is independent
    noise.

    Args:
      steps: the length of the run.
      bands: b, between 1 and `steps`; the number of draws per step.

    Raises:
      ValueError: `bands` is out of range.

    Source: Kalinin, McKenna, Upadhyay and Lampert, "Back to Square Roots: An Optimal Bound on the
    Matrix Factorization Error for Multi-Epoch Differentially Private SGD", 2025.

    >>> banded_inverse_square_root(steps=100, bands=4).coefficients
    (1.0, -0.5, -0.125, -0.0625)
    """
    if not 1 <= bands <= steps:
        raise ValueError(f"`bands` must be between 1 and steps={steps}, got {bands}.")
    i = np.arange(1, bands)
    return BandedInverseToeplitz((1.0, *np.cumprod((i - 1.5) / i).tolist()), steps)


def reciprocal(coefficients: Sequence[float], steps: int) -> np.ndarray:
    """Returns the first column of A, the power series of 1/Σ d_i zⁱ with d_0 = 1."""
    d = np.asarray(coefficients)
    column = np.zeros(steps)
    column[0] = 1.0
    for t in range(1, steps):
        past = column[max(0, t + 1 - d.size) : t][::-1]
        column[t] = -d[1 : 1 + past.size] @ past
    return column
