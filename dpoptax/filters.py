r"""Design and analysis of the low-pass filters (b, a) behind the noise.

A filter is the pair of coefficient tuples of

    m_t = -Σ_{τ=1}^{na} a_τ m_{t-τ} + Σ_{τ=0}^{nb} b_τ g_{t-τ} = Σ_{τ≥0} κ_τ g_{t-τ},

with g_t the input (the privatized gradient of step t), m_t the output and κ the impulse response.
`a` is written *without* the leading 1 of scipy's convention: `scipy.signal.lfilter(b, [1, *a], g)`
computes the same m. Frequencies are radians per step, in [0, π].

Filters act on gradients that are private already: nothing here changes a privacy guarantee.
Only NumPy and SciPy are imported.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, signal

_GAIN_TOLERANCE = 1e-6
_SETTLED = 1e-6
_MAX_STEPS = 1_000_000


class Filter(NamedTuple):
    """Coefficients of a linear recursive filter, without the leading 1 of `a`.

    Attributes:
      b: b_0 … b_nb, the weights of the input.
      a: a_1 … a_na, the weights of the past output; empty for a finite impulse response.
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = ()

    @property
    def order(self) -> int:
        """max(na, nb): the number of buffers that the filter needs."""
        return max(len(self.a), len(self.b) - 1)


_MOMENTUM = Filter((0.1,), (-0.9,))
_PMLF_CIFAR = Filter((0.15, -0.05), (-0.9,))
_PRESETS: Mapping[str, Filter] = {
    # DOPPLER, Table 2.
    "none": Filter((1.0,)),
    "momentum": _MOMENTUM,
    "doppler-first-order-1": Filter((1 / 11, 1 / 11), (-9 / 11,)),
    "doppler-first-order-2": Filter((3 / 11, -1 / 11), (-9 / 11,)),
    "doppler-second-order": Filter((1 / 58, 2 / 58, 1 / 58), (-92 / 58, 38 / 58)),
    # DOPPLER, Table 4.
    "doppler-f1": Filter((0.075, 0.025), (-0.9,)),
    "doppler-f2": Filter((0.025, 0.075), (-0.9,)),
    "doppler-f3": Filter((0.1, 0.1), (-0.8,)),
    "doppler-f4": Filter((0.2, 0.2), (-0.6,)),
    "doppler-f5": Filter((0.025, 0.05, 0.025), (-0.9,)),
    "doppler-f6": Filter((0.025, 0.025), (-1.8, 0.85)),
    # DP-PMLF, the choices of its experiments (appendix, hyper-parameters).
    "pmlf-mnist": _MOMENTUM,
    "pmlf-cifar": _PMLF_CIFAR,
    # DP-PMLF, Table 4, in its order.
    "pmlf-1": Filter((0.4,), (-0.6,)),
    "pmlf-2": Filter((0.2, 0.2), (-0.6,)),
    "pmlf-3": Filter((0.5, -0.1), (-0.6,)),
    "pmlf-4": _MOMENTUM,
    "pmlf-5": Filter((0.05, 0.05), (-0.9,)),
    "pmlf-6": _PMLF_CIFAR,
    "pmlf-7": Filter((0.05, 0.05), (-0.7, -0.2)),
    "pmlf-8": Filter((1.0,)),
}


def presets() -> dict[str, Filter]:
    """Return the filters of the papers by name.

    Sources: DOPPLER (Zhang et al. 2024), Table 2 ("none", "momentum", "doppler-first-order-1",
    "doppler-first-order-2", "doppler-second-order") and Table 4 ("doppler-f1" … "doppler-f6");
    DP-PMLF, Table 4 by row ("pmlf-1" … "pmlf-8") and the choice of its experiments on MNIST-like
    and CIFAR-like data ("pmlf-mnist", "pmlf-cifar").
    """
    return dict(_PRESETS)


def preset(name: str) -> Filter:
    """Return one filter of the papers; see `presets` for the names.

    Raises:
      ValueError: if no filter has this name.

    >>> preset("momentum")
    Filter(b=(0.1,), a=(-0.9,))
    """
    if name not in _PRESETS:
        raise ValueError(f"name={name!r} is no preset filter; choose one of {', '.join(_PRESETS)}")
    return _PRESETS[name]


def validate(
    b: ArrayLike,
    a: ArrayLike = (),
    *,
    unit_gain: bool = True,
    correctable: bool = True,
) -> Filter:
    """Check the coefficients of a filter and return them as a `Filter`.

    Refused are: an empty `b` and coefficients that are not finite; a pole (a root z of
    z^na + Σ_τ a_τ z^{na-τ}) on or outside the unit circle, for then the output grows without bound;
    with `unit_gain`, a gain Σb - Σa other than 1 by more than 1e-6, for then the step size is
    rescaled by stealth; with `correctable`, a step response c_t = Σ_{τ≤t} κ_τ that is not positive
    until it has settled, for the bias correction divides by it.

    The papers state the stability condition for 1 + Σ_τ a_τ x^τ with |x| < 1 (DOPPLER A.2); in that
    variable the roots must lie *outside* the circle, x being 1/z.

    Args:
      b: b_0 … b_nb.
      a: a_1 … a_na, without the leading 1.
      unit_gain: whether another gain than 1 is refused.
      correctable: whether a step response that reaches zero is refused.

    Raises:
      TypeError: if a coefficient is no real number.
      ValueError: as above, naming the pole, the gain, or the step.

    >>> validate([0.1], [-0.9])
    Filter(b=(0.1,), a=(-0.9,))
    """
    filt = Filter(_coefficients("b", b), _coefficients("a", a))
    hint = ""
    if filt.a and filt.a[0] == 1.0:
        hint = " (a starts with 1.0: it is written without scipy's leading 1, so pass a[1:])"
    if not filt.b:
        raise ValueError("b=() is empty: a filter needs at least b_0, such as b=[1.0]")
    for pole in poles(filt):
        if abs(pole) >= 1.0:
            raise ValueError(
                f"a={filt.a} is unstable: pole {pole:.6g} has modulus {abs(pole):.6g}, and every "
                f"pole must lie inside the unit circle{hint}; filters.butterworth designs a stable "
                "filter"
            )
    gain = sum(filt.b) - sum(filt.a)
    if unit_gain and not abs(gain - 1.0) <= _GAIN_TOLERANCE:
        raise ValueError(
            f"b={filt.b}, a={filt.a} has gain sum(b) - sum(a) = {gain:.9g}, and it must be 1"
            f"{hint}; scale b by {_rescaling(filt)}"
        )
    if correctable:
        _check_step_response(filt)
    return filt


def _coefficients(name: str, values: ArrayLike) -> tuple[float, ...]:
    array = np.asarray(values)
    if array.ndim != 1 or array.size and array.dtype.kind not in "fiu":
        raise TypeError(f"{name}={values!r} must be a flat sequence of real numbers")
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"{name}={values!r} has a coefficient that is not finite")
    return tuple(array.tolist())


def _rescaling(filt: Filter) -> str:
    if sum(filt.b) == 0.0:
        return "nothing: its sum is 0, so that no scale gives unit gain"
    return f"{(1.0 + sum(filt.a)) / sum(filt.b):.9g}"


def _check_step_response(filt: Filter) -> None:
    modulus = max(np.abs(poles(filt)), default=0.0)
    steps = filt.order + 1
    if modulus > 0.0:
        # A repeated pole settles as t^order times a geometric sequence; the factor 2 covers it.
        steps += int(min(_MAX_STEPS, 2 * filt.order * np.log(_SETTLED) / np.log(modulus)))
    kappa = impulse_response(filt, steps)
    response = np.cumsum(kappa)
    # What cancels below the resolution of float32 counts as zero.
    bad = np.flatnonzero(response <= _SETTLED * np.cumsum(np.abs(kappa)))
    if bad.size:
        t = int(bad[0])
        raise ValueError(
            f"b={filt.b}, a={filt.a} cannot be corrected for its start: the step response is "
            f"c_{t} = {response[t]:.6g} at t = {t}, and the correction divides by it, so it must "
            "stay positive; choose other coefficients, or a start without correction"
        )


def poles(filt: Filter) -> NDArray[np.complex128]:
    """Return the poles in z, the roots of z^na + Σ a_τ z^{na-τ}; shape (na,)."""
    return np.roots(np.array([1.0, *filt.a])).astype(np.complex128)


def zeros(filt: Filter) -> NDArray[np.complex128]:
    """Return the finite zeros in z, the roots of Σ b_τ z^{nb-τ}; shape (nb,) or less."""
    return np.roots(np.array(filt.b)).astype(np.complex128)


def impulse_response(filt: Filter, length: int) -> NDArray[np.float64]:
    """Return κ_0 … κ_{length-1}, the weight of the input τ steps ago; shape (length,).

    DOPPLER eq. (6) writes κ by partial fractions, which needs distinct poles; the recursion here
    does not.

    >>> impulse_response(preset("momentum"), 3).round(6).tolist()
    [0.1, 0.09, 0.081]
    """
    impulse = np.zeros(length)
    impulse[:1] = 1.0
    return np.asarray(signal.lfilter(filt.b, [1.0, *filt.a], impulse), np.float64)


def step_response(filt: Filter, length: int) -> NDArray[np.float64]:
    """Return c_0 … c_{length-1}, the output for the constant input 1: the bias correction."""
    return np.cumsum(impulse_response(filt, length))


def frequency_response(filt: Filter, omega: ArrayLike) -> NDArray[np.complex128]:
    """Return H(e^{iω}) = Σ_τ κ_τ e^{-iωτ} at ω in radians per step; the shape of `omega`."""
    z = np.exp(-1j * np.asarray(omega, np.float64))
    response = np.polyval(filt.b[::-1], z) / np.polyval((1.0, *filt.a)[::-1], z)
    return np.asarray(response, np.complex128)


def group_delay(filt: Filter) -> float:
    """Return the delay in steps of a slowly varying input: Σ τκ_τ / Σ κ_τ.

    This is the age of the average gradient in the output, the price of the smoothing. The filter
    must have a gain other than 0.
    """
    b, a = np.array(filt.b), np.array((1.0, *filt.a))
    return float(b @ np.arange(b.size) / b.sum() - a @ np.arange(a.size) / a.sum())


def noise_gain(filt: Filter) -> float:
    """Return Σ_τ κ_τ²: the variance of the settled output for white input of variance 1.

    Exact, by the discrete Lyapunov equation; for a stable filter only.

    >>> round(noise_gain(preset("momentum")), 6)  # 0.01 / (1 - 0.81)
    0.052632
    """
    n = filt.order
    b = np.pad(filt.b, (0, n + 1 - len(filt.b)))
    if not filt.a:
        return float(b @ b)
    a = np.pad(filt.a, (0, n - len(filt.a)))
    transition = np.eye(n, k=1)
    transition[:, 0] = -a
    drive = b[1:] - a * b[0]
    covariance = linalg.solve_discrete_lyapunov(transition, np.outer(drive, drive))
    return float(covariance[0, 0] + b[0] ** 2)


def snr(filt: Filter, autocorrelation: ArrayLike, steps: int | None = None) -> float:
    """Return the normalized signal-to-noise ratio of DOPPLER eq. (5).

    SNR = Σ_{t<T} Σ_{τ≤t} c_τκ_τ / Σ_{t<T} Σ_{τ≤t} κ_τ²; without a filter it is c_0 = 1/2.

    For uncorrelated gradients (c_τ = 0 beyond c_0) the ratio of eq. (5) can exceed 1/2, and under
    unit gain it is not maximal at κ ∝ c as the paper has it, because it ignores that a smaller
    Σ c_τκ_τ also slows the descent. `effective_snr` accounts for both.

    Args:
      filt: a stable filter.
      autocorrelation: c_0, c_1, … of DOPPLER eq. (3); lags beyond its end count as 0.
      steps: the horizon T; None is the limit of many steps.
    """
    numerator, denominator = _correlated_sums(filt, autocorrelation, steps)
    return numerator / denominator


def effective_snr(filt: Filter, autocorrelation: ArrayLike, steps: int | None = None) -> float:
    """Return (Σ c_τκ_τ)² / Σ κ_τ², the merit of a filter at its best step size.

    With S = Σ c_τκ_τ (averaged over steps, like the denominator), DOPPLER's bound (7) reads
    (F_0 - F*)/(ηST) + ηLσ²·Σκ²/(2S); over η its minimum is √(2LF_0σ²/T) / √(S²/Σκ²). So this
    ratio, unlike eq. (5), does not change with the gain of the filter and is maximal at κ ∝ c.
    Arguments as for `snr`; without a filter it is c_0² = 1/4.
    """
    numerator, denominator = _correlated_sums(filt, autocorrelation, steps)
    return numerator**2 / denominator


def _correlated_sums(
    filt: Filter, autocorrelation: ArrayLike, steps: int | None
) -> tuple[float, float]:
    c = np.asarray(autocorrelation, np.float64)
    if c.ndim != 1 or not c.size:
        raise ValueError(f"autocorrelation has shape {c.shape}; it must be (lags,) with lags ≥ 1")
    if steps is None:
        return float(c @ impulse_response(filt, c.size)), noise_gain(filt)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1, or None for the limit")
    kappa = impulse_response(filt, steps)
    share = 1.0 - np.arange(steps) / steps
    lags = min(steps, c.size)
    return float((share * kappa)[:lags] @ c[:lags]), float(share @ kappa**2)


def butterworth(order: int, cutoff: float) -> Filter:
    """Design a Butterworth low-pass filter: maximally flat, unit gain.

    Args:
      order: the number of poles, and of buffers; at least 1.
      cutoff: the half-power frequency as a share of the highest one: cutoff·π radians per step.

    Raises:
      ValueError: if order < 1, cutoff is not in (0, 1), or the filter is so narrow for its order
          that float64 cannot represent it.

    >>> [round(x, 3) for x in butterworth(1, 0.0635).b]  # DOPPLER's first filter, 1/11
    [0.091, 0.091]
    """
    _check_design(order, cutoff)
    return _normalized(*signal.butter(order, cutoff))


def chebyshev(order: int, cutoff: float, ripple: float) -> Filter:
    """Design a Chebyshev low-pass filter of type I, steeper than Butterworth for its order.

    Normalised to gain 1 at frequency 0, also for an even order, where scipy's design has gain 1 at
    the crest of the ripple: the pass band then reaches up to `ripple` dB above 1.

    Args:
      order: the number of poles, and of buffers; at least 1.
      cutoff: the edge of the pass band as a share of the highest frequency, in (0, 1).
      ripple: the height of the ripple in the pass band in decibel, positive.

    Raises:
      ValueError: as for `butterworth`, and if ripple is not positive.
    """
    _check_design(order, cutoff)
    if not 0.0 < ripple < np.inf:
        raise ValueError(f"ripple={ripple} must be a positive number of decibel, such as 1.0")
    return _normalized(*signal.cheby1(order, ripple, cutoff))


def _check_design(order: int, cutoff: float) -> None:
    if not isinstance(order, int | np.integer) or order < 1:
        raise ValueError(f"order={order} must be a whole number of at least 1")
    if not 0.0 < cutoff < 1.0:
        raise ValueError(
            f"cutoff={cutoff} must lie in (0, 1), as a share of the highest frequency (π per step)"
        )


def _normalized(b: NDArray[np.float64], a: NDArray[np.float64]) -> Filter:
    # The gain is that of the rounded coefficients, not of the design they came from.
    if not (np.all(np.isfinite(b)) and b.sum() > 0.0 and a.sum() > 0.0):
        raise ValueError(
            "the filter is too narrow for its order: its coefficients cancel in float64; raise "
            "cutoff or lower order"
        )
    return validate(b * (a.sum() / b.sum()), a[1:], correctable=False)


def optimal_fir(autocorrelation: ArrayLike) -> Filter:
    """Return the finite filter that is best for known gradient correlations: b_τ = c_τ / Σ c_τ.

    Estimates below 0 are clipped at 0, for a filter with negative weights on noisy estimates of
    correlation raises the noise. Maximises `effective_snr` over all filters of this length
    (DOPPLER 5.3, eq. (8), for the reason given at `snr`).

    Args:
      autocorrelation: c_0 … c_nb of DOPPLER eq. (3), in any unit; c_0 > 0.

    Raises:
      ValueError: if an entry is not finite or c_0 is not positive.

    >>> optimal_fir([2.0, 1.0, -0.5, 1.0]).b
    (0.5, 0.25, 0.0, 0.25)
    """
    c = np.asarray(autocorrelation, np.float64)
    if c.ndim != 1 or not c.size or not np.all(np.isfinite(c)) or c[0] <= 0.0:
        raise ValueError(
            f"autocorrelation={autocorrelation!r} must be a flat sequence of finite numbers that "
            "starts with c_0 > 0"
        )
    weights = np.maximum(c, 0.0)
    return validate(weights / weights.sum())
