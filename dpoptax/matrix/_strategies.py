"""Strategies of correlated noise: lower-triangular Toeplitz matrices, given or optimal."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpoptax.matrix._jax_privacy import jax_privacy_module

if TYPE_CHECKING:
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling import Sampler


# How many times Z the noise of a step may be. Float32 rounds 2⁻²⁴ of the latter off: so some 10⁻⁵
# of Z at most. Optimal strategies come to 2.
_MOST_NOISE = 2.0**6


class Strategy(abc.ABC):
    """A lower-triangular Toeplitz matrix C whose columns have l2 norm 1 at most.

    With all diagonals this holds up to the rounding of C's parameters to float32. `column` includes
    the rounding, and prices are made with it. Subclasses are frozen dataclasses: static, hashable.
    """

    @property
    @abc.abstractmethod
    def bands(self) -> int | None:
        """How many diagonals of C are not zero; None for all."""

    @abc.abstractmethod
    def column(self, steps: int) -> np.ndarray:
        """The first column of C over that many steps, float64; the others are it, moved down."""

    @abc.abstractmethod
    def noising_matrix(self) -> "StreamingMatrix":
        """C⁻¹ as jax_privacy's `StreamingMatrix`, in float32."""

    @property
    def redrawn(self) -> tuple[float, ...] | None:
        """The weights of Z_t, Z_{t−1}, … in row t of C⁻¹ where they are few, else None: here.

        With them noise is drawn again from its keys, and no buffer of it is kept.
        """
        return None

    def under(self, sampler: "Sampler") -> "Participation":
        """The strategy with batches drawn by `sampler`: what `dpoptax.accounting` can price.

        Raises:
          ValueError: the sampler lets an example take part in steps between which the strategy
            correlates noise, so that no ε is known.
        """
        from dpoptax.matrix._participation import Participation

        return Participation(self, sampler)


@dataclasses.dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """C with b diagonals: C[t, t − i] = c_i/‖c‖ for i < b.

    Under `CyclicPoissonSampler` with a cycle of b steps or more, no example takes part in two steps
    that share a band, and the run costs what independent noise of the same multiplier costs over
    ⌈steps/cycle⌉ Poisson samples. One band is independent noise.

    Attributes:
      coefficients: c_0, c_1, …, c_{b−1}, with c_0 > 0; normalised to l2 norm 1, and rounded to
        float32 toward zero: the noise is made with the numbers that are priced.

    Raises:
      ValueError: no or non-finite coefficients, c_0 not positive, or a C whose inverse is unstable,
        or so nearly that the noise of a step comes to more than 64 times Z: float32 would round Z
        off, and with it what hides an example.

    >>> BandedToeplitz((2.0,)).coefficients
    (1.0,)
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        c = checked_coefficients(self.coefficients)
        c = c / np.linalg.norm(c)
        rounded = c.astype(np.float32)
        rounded = np.where(
            np.abs(rounded) > np.abs(c), np.nextafter(rounded, np.float32(0)), rounded
        )
        noise = _settled_noise(rounded.astype(float))
        if noise > _MOST_NOISE:
            grows = (
                "In float32, 1/C(z) has a pole on or outside the unit circle, so the noise would "
                "grow without bound."
                if noise == np.inf
                else f"The noise of a step is up to {noise:.3g} times that which hides an example, "
                "and float32 would round off the latter."
            )
            raise ValueError(
                "`coefficients` must give a C whose inverse enlarges the noise at most "
                f"{_MOST_NOISE:g} times, got {self.coefficients}. {grows} Move the poles of 1/C(z) "
                "further into the unit circle."
            )
        object.__setattr__(self, "coefficients", tuple(rounded.tolist()))

    @property
    def bands(self) -> int:
        """b, the number of coefficients."""
        return len(self.coefficients)

    def column(self, steps: int) -> np.ndarray:
        """c/‖c‖ and zeros, or as much of it as there are steps."""
        column = np.zeros(max(steps, self.bands))
        column[: self.bands] = self.coefficients
        return column[:steps]

    def noising_matrix(self) -> "StreamingMatrix":
        """The recursion x_t = (z_t − Σ c_i x_{t−i})/c_0, with b − 1 buffers."""
        toeplitz = jax_privacy_module("matrix_factorization.toeplitz")
        return toeplitz.inverse_as_streaming_matrix(np.asarray(self.coefficients, np.float32))


@dataclasses.dataclass(frozen=True)
class BufferedToeplitz(Strategy):
    """C with all diagonals, from few buffers: C[t, t − i] ∝ Σ_j scale_j decay_j^{i−1}, C[t, t] ∝ 1.

    Normalised so that its first column has l2 norm 1 over `steps` steps; a longer run is not
    accounted for. It wants a sampler whose examples take part in fixed, distant steps: a
    `CyclicPoissonSampler` with cycle · batch_size = dataset_size.

    Attributes:
      decay: θ_j in [0, 1), one a buffer. Rounded to float32, as the scales are: the noise is made
        with the numbers that are priced.
      scale: ω_j ≥ 0, one a buffer.
      steps: the length of the run.

    Raises:
      ValueError: decays outside [0, 1) in float32, negative scales, different numbers of the two,
        or an inverse that is unstable, or so nearly that the noise of a step comes to more than 64
        times Z, as for `BandedToeplitz`.

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
                f"`decay` and `scale` must have as many entries, got {self.decay} and {self.scale}."
            )
        if not (np.all((decay >= 0) & (decay < 1)) and np.all(scale >= 0)):
            raise ValueError(
                "`decay` must be in [0, 1), in float32, and `scale` at least 0, got "
                f"{self.decay} and {self.scale}."
            )
        # C⁻¹ has the buffers' matrix diag(θ) − ω 1ᵀ.
        if np.abs(np.linalg.eigvals(np.diag(decay) - scale[:, None])).max() > 1.0:
            raise ValueError(
                f"C must have a stable inverse, got decay={self.decay} and scale={self.scale}. "
                "With an unstable one the noise would grow without bound."
            )
        if self.steps < 1:
            raise ValueError(
                f"`steps` must be at least 1, got {self.steps}. Pass the length of the run."
            )
        object.__setattr__(self, "decay", tuple(decay.tolist()))
        object.__setattr__(self, "scale", tuple(scale.tolist()))
        noise = self._norm * _buffered_noise(decay, scale, self.steps)
        if not noise <= _MOST_NOISE:
            raise ValueError(
                f"The noise of a step must be at most {_MOST_NOISE:g} times that which hides an "
                f"example, got {noise:.3g} times within {self.steps} steps for decay={self.decay} "
                f"and scale={self.scale}. Beyond, float32 would round off the latter. Take smaller "
                "decays or scales."
            )

    @property
    def bands(self) -> None:
        """None: every step's noise depends on all earlier ones."""

    def column(self, steps: int) -> np.ndarray:
        """Of C, up to `steps`."""
        if steps > self.steps:
            raise ValueError(
                f"The strategy was made for {self.steps} steps, not for {steps}. Make another."
            )
        return self._raw(steps) / self._norm

    def noising_matrix(self) -> "StreamingMatrix":
        """The inverse recursion of McMahan et al., Algorithm 3, with one buffer a decay."""
        blt = jax_privacy_module("matrix_factorization.buffered_toeplitz")
        inverse = blt.BufferedToeplitz.build(
            self.decay, self.scale, dtype=np.float32
        ).inverse_as_streaming_matrix()
        import jax.numpy as jnp

        return inverse.scale_rows_and_columns(row_scale=jnp.full(1, self._norm, jnp.float32))

    @property
    def _norm(self) -> float:
        """Of the first column over all steps, as float32 has it."""
        return float(np.float32(np.linalg.norm(self._raw(self.steps))))

    def _raw(self, steps: int) -> np.ndarray:
        powers = np.asarray(self.decay)[None, :] ** np.arange(max(steps - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ np.asarray(self.scale)])[:steps]


def optimal_banded_toeplitz(
    steps: int, bands: int, *, optimizer_steps: int = 250
) -> BandedToeplitz:
    """The banded strategy with the least mean squared error of the noisy gradient sums.

        min_C (1/steps) Σ_t Var[(A C⁻¹ Z)_t] · ‖C e_1‖²,    A the lower triangle of ones

    that is, of SGD's parameters at a constant learning rate without filter. Computed by
    jax_privacy's L-BFGS in float64.

    Args:
      steps: the length of the run; a shorter or longer one is accounted for as well.
      bands: b, between 1 and `steps`.
      optimizer_steps: iterations of L-BFGS.

    Raises:
      ValueError: `bands` outside its range.

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
    """The buffered strategy with the least error of the noisy sums, for fixed participation.

    The error is that of `optimal_banded_toeplitz`, times the squared sensitivity of an example that
    takes part every `cycle_length` steps. Computed by jax_privacy's L-BFGS in float64.

    Args:
      steps: the length of the run.
      cycle_length: the sampler's.
      error: "mean" or "max" over the steps.
      max_buffers: more are tried as long as they help.

    Raises:
      ValueError: an argument out of its range.
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


def checked_coefficients(coefficients: Sequence[float]) -> np.ndarray:
    """The coefficients of a strategy; raises unless they are finite and the first is positive."""
    found = np.asarray(coefficients, float).ravel()
    if not (found.size and np.isfinite(found).all() and found[0] > 0):
        raise ValueError(
            f"`coefficients` must be finite numbers, the first positive, got {coefficients}."
        )
    return found


def _settled_noise(coefficients: np.ndarray) -> float:
    """The standard deviation of (C⁻¹Z)_t as t grows: ‖h‖ of 1/Σ c_i zⁱ = Σ h_t z^t.

        ‖h‖⁻² = c_0² Π_m (1 − k_m²)

    with k_m the last coefficient of the m-th polynomial, c_0 = 1, that is left as the recursion of
    Levinson and Durbin is run backwards. Infinite where one |k_m| is 1 or more: that is so for a
    pole on or outside the unit circle, and for no other C (Schur and Cohn).
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # c_0 that float32 has as 0
        left = coefficients / coefficients[0]
        noise = float(1 / coefficients[0])
        while left.size > 1:
            last = left[-1]
            if not abs(last) < 1.0:
                return float("inf")
            noise /= float(np.sqrt((1 - last) * (1 + last)))
            left = (left[:-1] - last * left[:0:-1]) / ((1 - last) * (1 + last))
    return noise


def _buffered_noise(decay: np.ndarray, scale: np.ndarray, steps: int) -> float:
    """The standard deviation of (C⁻¹Z)_t at the last step, for a C whose diagonal is 1.

        h_0 = 1,  h_t = −√ωᵀ S^(t−1) √ω,    S = diag(θ) − √ω √ωᵀ

    are the entries of C⁻¹. With λ and v the eigenvalues and eigenvectors of S, and g = ⟨v, √ω⟩²,

        ‖h‖² = 1 + Σ_ij g_i g_j Σ_t (λ_i λ_j)^t,    t = 0, …, steps − 2
    """
    root = np.sqrt(scale)
    eigenvalues, vectors = np.linalg.eigh(np.diag(decay) - np.outer(root, root))
    weights = (vectors.T @ root) ** 2
    ratios = np.multiply.outer(eigenvalues, eigenvalues)
    gaps, sums = 1 - ratios, np.full_like(ratios, steps - 1)
    np.divide(1 - ratios ** (steps - 1), gaps, out=sums, where=np.abs(gaps) > 1e-12)
    return float(np.sqrt(1 + weights @ sums @ weights))


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.asarray(values, float).tolist())
