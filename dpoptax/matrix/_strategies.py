"""Strategies of correlated noise: lower-triangular Toeplitz matrices."""

import dataclasses
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from dpoptax.matrix._participation import Strategy

if TYPE_CHECKING:
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix


# The largest noise of a step, in units of Z. Float32 rounds this noise by a share of 2⁻²⁴, which is
# about 10⁻⁵ of Z at most. Optimal strategies reach 2.
_MOST_NOISE = 2.0**6


@dataclasses.dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """Strategy with b diagonals: A[t, t − i] = c_i/‖c‖ for i < b.

    With a `CyclicPoissonSampler` whose cycle has at least b steps, no example takes part in two
    steps that share a band. The run then has the price of independent noise with the same
    multiplier over ⌈steps/cycle⌉ Poisson samples. One band is independent noise.

    Attributes:
      coefficients: c_0, c_1, …, c_{b−1}, with c_0 > 0. They are normalized to l2 norm 1 and rounded
        to float32 toward zero. The noise and its price use the rounded numbers.

    Raises:
      ValueError: coefficients are missing or not finite, c_0 is not positive, or the inverse of A
        is unstable or amplifies the noise of a step to more than 64 times Z. Float32 would then
        round off Z, which hides an example.

    >>> BandedToeplitz((2.0,)).coefficients
    (1.0,)
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        c = np.asarray(self.coefficients, float).ravel()
        if not (c.size and np.isfinite(c).all() and c[0] > 0):
            raise ValueError(
                "`coefficients` must be finite numbers, the first positive, got "
                f"{self.coefficients}."
            )
        c = c / np.linalg.norm(c)
        rounded = c.astype(np.float32)
        # Toward zero, so that the norm stays at most 1.
        rounded = np.where(
            np.abs(rounded) > np.abs(c), np.nextafter(rounded, np.float32(0)), rounded
        )
        noise = _settled_noise(rounded.astype(float))
        if noise > _MOST_NOISE:
            grows = (
                "In float32, 1/Σ c_i z⁻ⁱ has a pole on or outside the unit circle, so the noise "
                "would grow without bound."
                if noise == np.inf
                else f"The noise of a step is up to {noise:.3g} times the noise Z that hides an "
                "example, and float32 would round off Z."
            )
            raise ValueError(
                "`coefficients` must give a strategy whose inverse amplifies the noise at most "
                f"{_MOST_NOISE:g} times, got {self.coefficients}. {grows} Move the poles of "
                "1/Σ c_i z⁻ⁱ further into the unit circle."
            )
        object.__setattr__(self, "coefficients", tuple(rounded.tolist()))

    @property
    def bands(self) -> int:
        """b, the number of coefficients."""
        return len(self.coefficients)

    @property
    def checkpoint_key(self) -> str:
        return stable_key("banded_toeplitz/1", *self.coefficients)

    def column(self, steps: int) -> np.ndarray:
        """Returns the first `steps` entries of c/‖c‖ followed by zeros."""
        column = np.zeros(max(steps, self.bands))
        column[: self.bands] = self.coefficients
        return column[:steps]

    def noising_matrix(self) -> "StreamingMatrix":
        """Returns the recursion x_t = (z_t − Σ c_i x_{t−i})/c_0, with b − 1 buffers."""
        toeplitz = jax_privacy_module("matrix_factorization.toeplitz")
        return toeplitz.inverse_as_streaming_matrix(np.asarray(self.coefficients, np.float32))


@dataclasses.dataclass(frozen=True)
class BufferedToeplitz(Strategy):
    """Strategy with all diagonals, computed with few buffers.

        A[t, t] ∝ 1,    A[t, t − i] ∝ Σ_j ω_j θ_j^{i−1}

    A is normalized so that its first column has l2 norm 1 over `steps` steps; a longer run is not
    accounted for. Use a sampler whose examples take part in fixed, distant steps: a
    `CyclicPoissonSampler` with cycle_length · batch_size = dataset_size.

    Attributes:
      decay: θ_j in [0, 1), one per buffer. Decays and scales are rounded to float32. The noise and
        its price use the rounded numbers.
      scale: ω_j ≥ 0, one per buffer.
      steps: the length of the run.

    Raises:
      ValueError: a decay is outside [0, 1) in float32, a scale is negative, their numbers differ,
        `steps` is not positive, or the inverse of A is unstable or amplifies the noise of a step to
        more than 64 times Z (see `BandedToeplitz`).

    >>> BufferedToeplitz((0.5,), (0.4,), steps=100).bands is None
    True
    """

    decay: tuple[float, ...]
    scale: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        decay, scale = (
            np.asarray(x, float).astype(np.float32).astype(float) for x in (self.decay, self.scale)
        )
        if decay.ndim != 1 or decay.shape != scale.shape or not decay.size:
            raise ValueError(
                "`decay` and `scale` must have the same number of entries, at least one, got "
                f"{self.decay} and {self.scale}."
            )
        if not (np.all((decay >= 0) & (decay < 1)) and np.all(scale >= 0)):
            raise ValueError(
                "`decay` must be in [0, 1), in float32, and `scale` at least 0, got "
                f"{self.decay} and {self.scale}."
            )
        # The buffers of A⁻¹ have the transition matrix diag(θ) − ω 1ᵀ.
        if np.abs(np.linalg.eigvals(np.diag(decay) - scale[:, None])).max() > 1.0:
            raise ValueError(
                f"The inverse of the strategy must be stable, got decay={self.decay} and "
                f"scale={self.scale}. Otherwise the noise would grow without bound."
            )
        if self.steps < 1:
            raise ValueError(
                f"`steps` must be at least 1, got {self.steps}. Pass the length of the run."
            )
        object.__setattr__(self, "decay", tuple(decay.tolist()))
        object.__setattr__(self, "scale", tuple(scale.tolist()))
        # `_buffered_noise` is for the matrix with diagonal 1, which is A times this norm.
        noise = self._norm * _buffered_noise(decay, scale, self.steps)
        if not noise <= _MOST_NOISE:
            raise ValueError(
                f"The noise of a step must be at most {_MOST_NOISE:g} times the noise Z that hides "
                f"an example, got {noise:.3g} times within {self.steps} steps for decay="
                f"{self.decay} and scale={self.scale}. Otherwise float32 would round off Z. Use "
                "smaller decays or scales."
            )

    @property
    def bands(self) -> None:
        """None, since A has all diagonals."""

    @property
    def checkpoint_key(self) -> str:
        return stable_key("buffered_toeplitz/1", self.steps, *self.decay, *self.scale)

    def column(self, steps: int) -> np.ndarray:
        """Returns the first column of A over `steps` steps."""
        if steps > self.steps:
            raise ValueError(
                f"The strategy was made for {self.steps} steps, not for {steps}. Make another."
            )
        return self._raw(steps) / self._norm

    def noising_matrix(self) -> "StreamingMatrix":
        """Returns the inverse recursion of McMahan et al., Algorithm 3."""
        blt = jax_privacy_module("matrix_factorization.buffered_toeplitz")
        inverse = blt.BufferedToeplitz.build(
            self.decay, self.scale, dtype=np.float32
        ).inverse_as_streaming_matrix()
        import jax.numpy as jnp

        # A is divided by its norm, so its inverse is multiplied by it.
        return inverse.scale_rows_and_columns(row_scale=jnp.full(1, self._norm, jnp.float32))

    @property
    def _norm(self) -> float:
        """The norm of the unnormalized first column over all steps, rounded to float32."""
        return float(np.float32(np.linalg.norm(self._raw(self.steps))))

    def _raw(self, steps: int) -> np.ndarray:
        # θ_j^(i − 1) for i = 1, 2, …
        powers = np.asarray(self.decay)[None, :] ** np.arange(max(steps - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ np.asarray(self.scale)])[:steps]


def optimal_banded_toeplitz(
    steps: int, bands: int, *, optimizer_steps: int = 250
) -> BandedToeplitz:
    """Computes the banded strategy with the least error of the noisy sums.

        min_A (1/steps) Σ_t Var[(S A⁻¹Z)_t] · ‖A e_1‖²,    S lower triangular with ones

    This is the mean squared error of SGD's parameters at a constant learning rate without a filter.
    The optimizer is jax_privacy's L-BFGS in float64.

    Args:
      steps: the length of the run; shorter or longer runs are accounted for as well.
      bands: b, between 1 and `steps`.
      optimizer_steps: number of L-BFGS iterations.

    Raises:
      ValueError: `bands` is out of range.

    >>> optimal_banded_toeplitz(steps=16, bands=1).coefficients
    (1.0,)
    """
    if not 1 <= bands <= steps:
        raise ValueError(f"`bands` must be between 1 and steps={steps}, got {bands}.")
    if bands == 1:
        return BandedToeplitz((1.0,))
    toeplitz = jax_privacy_module("matrix_factorization.toeplitz")
    return BandedToeplitz(
        _floats(
            toeplitz.optimize_banded_toeplitz(steps, bands, max_optimizer_steps=optimizer_steps)
        )
    )


def optimal_buffered_toeplitz(
    steps: int, cycle_length: int, *, error: str = "mean", max_buffers: int = 4
) -> BufferedToeplitz:
    """Computes the buffered strategy with the least error, for fixed participation.

    The error is that of `optimal_banded_toeplitz`, times the squared sensitivity of an example that
    takes part every `cycle_length` steps. The optimizer is jax_privacy's L-BFGS in float64.

    Args:
      steps: the length of the run.
      cycle_length: the cycle length of the sampler.
      error: "mean" or "max" over the steps.
      max_buffers: the largest number of buffers. Buffers are added as long as they help.

    Raises:
      ValueError: an argument is out of range.
    """
    if error not in ("mean", "max") or not 1 <= cycle_length <= steps:
        raise ValueError(
            "`error` must be 'mean' or 'max', and `cycle_length` between 1 and "
            f"steps={steps}, got {error!r} and {cycle_length}."
        )
    blt = jax_privacy_module("matrix_factorization.buffered_toeplitz")
    import jax

    with jax.enable_x64(True):
        found = blt.optimize(
            n=steps,
            min_sep=cycle_length,
            max_participations=None,
            error=error,
            min_buffers=1,
            max_buffers=max_buffers,
        )
        return BufferedToeplitz(_floats(found.buf_decay), _floats(found.output_scale), steps)


def jax_privacy_module(name: str) -> ModuleType:
    """Returns a module of jax_privacy.

    Raises:
      ImportError: jax_privacy, a dependency of `dpoptax[matrix]`, is not installed.
    """
    try:
        return importlib.import_module(f"jax_privacy.{name}")
    except ImportError as error:
        raise ImportError(
            "Correlated noise needs jax_privacy, which is not installed. Run "
            "`pip install 'dpoptax[matrix]'`."
        ) from error


def stable_key(name: str, *parameters: float) -> str:
    """Returns a `checkpoint_key` from a versioned name and exact parameters.

    >>> stable_key("banded_toeplitz/1", 1.0, -0.5)
    'banded_toeplitz/1 0x1.0000000000000p+0 -0x1.0000000000000p-1'
    """
    return " ".join([name, *(float(x).hex() for x in parameters)])


def _settled_noise(coefficients: np.ndarray) -> float:
    """Returns the standard deviation of (A⁻¹Z)_t for large t.

    It is ‖h‖, with 1/Σ c_i z⁻ⁱ = Σ h_t z⁻ᵗ, and

        ‖h‖⁻² = c_0² Π_m (1 − k_m²).

    k_m is the last coefficient of the m-th polynomial of the backward recursion of Levinson and
    Durbin, scaled to c_0 = 1. The result is infinite if some |k_m| is at least 1. This holds if and
    only if a pole is on or outside the unit circle (Schur and Cohn).
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # c_0 may be 0 in float32
        left = coefficients / coefficients[0]
        noise = float(1 / coefficients[0])
        while left.size > 1:
            last = left[-1]
            if not abs(last) < 1.0:
                return float("inf")
            # (1 − k)(1 + k) is more precise than 1 − k² if |k| is near 1.
            noise /= float(np.sqrt((1 - last) * (1 + last)))
            left = (left[:-1] - last * left[:0:-1]) / ((1 - last) * (1 + last))
    return noise


def _buffered_noise(decay: np.ndarray, scale: np.ndarray, steps: int) -> float:
    """Returns the standard deviation of (A⁻¹Z)_t at the last step, for diagonal 1.

        h_0 = 1,  h_t = −√ωᵀ M^(t−1) √ω,    M = diag(θ) − √ω √ωᵀ

    are the entries of A⁻¹. With λ and v the eigenvalues and eigenvectors of M, and g = ⟨v, √ω⟩²,

        ‖h‖² = 1 + Σ_ij g_i g_j Σ_t (λ_i λ_j)^t,    t = 0, …, steps − 2
    """
    root = np.sqrt(scale)
    eigenvalues, vectors = np.linalg.eigh(np.diag(decay) - np.outer(root, root))
    weights = (vectors.T @ root) ** 2
    ratios = np.multiply.outer(eigenvalues, eigenvalues)
    # Geometric sums. A ratio of about 1 has steps − 1 terms of 1.
    gaps, sums = 1 - ratios, np.full_like(ratios, steps - 1)
    np.divide(1 - ratios ** (steps - 1), gaps, out=sums, where=np.abs(gaps) > 1e-12)
    return float(np.sqrt(1 + weights @ sums @ weights))


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.asarray(values, float).tolist())
