"""Filter coefficients, presets from papers, and validation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GAIN_TOLERANCE = 1e-6
_SETTLED = 1e-6
_MAX_STEPS = 1_000_000


class Filter(NamedTuple):
    """Coefficients of a linear recursive filter, without the leading 1 of `a`.

    Attributes:
      b: b_0 … b_nb, the weights of the input.
      a: a_1 … a_na, the weights of past outputs; empty for a finite impulse response.
    """

    b: tuple[float, ...]
    a: tuple[float, ...] = ()

    @property
    def order(self) -> int:
        """Returns max(na, nb), the number of buffers that the filter needs."""
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
    # DP-PMLF, the filters of its experiments (appendix, hyper-parameters).
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
    """Returns the filters of the papers by name.

    Source: DOPPLER (Zhang et al. 2024), Table 2 ("none", "momentum", "doppler-first-order-1",
    "doppler-first-order-2", "doppler-second-order") and Table 4 ("doppler-f1" … "doppler-f6");
    DP-PMLF, Table 4 by row ("pmlf-1" … "pmlf-8") and the filters of its experiments on MNIST-like
    and CIFAR-like data ("pmlf-mnist", "pmlf-cifar").
    """
    return dict(_PRESETS)


def preset(name: str) -> Filter:
    """Returns one filter of the papers; see `presets` for the names.

    Raises:
      ValueError: the name is unknown.

    >>> preset("momentum")
    Filter(b=(0.1,), a=(-0.9,))
    """
    if name not in _PRESETS:
        raise ValueError(f"`name` must be one of {', '.join(_PRESETS)}, got {name!r}.")
    return _PRESETS[name]


def resolve_preset(
    b: Sequence[float] | None, a: Sequence[float], name: str
) -> tuple[Sequence[float], Sequence[float]]:
    """Returns `b` and `a`, or those of the preset `name` if neither is given."""
    if b is not None:
        return b, a
    if len(a):
        raise ValueError(f"`a` must be given with `b`, got a={a!r}. Omit both for {name!r}.")
    return preset(name)


def validate(b: ArrayLike, a: ArrayLike = (), *, correctable: bool = True) -> Filter:
    """Checks the coefficients of a filter and returns them as a `Filter`.

    It raises an error in these cases:

    - `b` is empty, or a coefficient is not finite;
    - a pole, a root z of z^na + Σ_τ a_τ z^{na-τ}, is on or outside the unit circle, because the
      output would grow without bound;
    - the gain Σb - Σa differs from 1 by more than 1e-6, because this would rescale the step size;
    - with `correctable`, the step response c_t = Σ_{τ≤t} κ_τ is not positive at some t before it
      settles, because the bias correction divides by it.

    The papers state the stability condition for 1 + Σ_τ a_τ x^τ with |x| < 1 (DOPPLER A.2). In that
    variable, x = 1/z, the roots must lie *outside* the circle.

    Args:
      b: b_0 … b_nb.
      a: a_1 … a_na, without the leading 1.
      correctable: whether the step response must be positive.

    Raises:
      TypeError: a coefficient is not a real number.
      ValueError: one of the cases above. The message names the pole, the gain, or the step.

    >>> validate([0.1], [-0.9])
    Filter(b=(0.1,), a=(-0.9,))
    """
    filt = Filter(_coefficients("b", b), _coefficients("a", a))
    hint = ""
    if filt.a and filt.a[0] == 1.0:
        hint = " `a` starts with 1.0. Omit scipy's leading 1: pass `a[1:]`."
    if not filt.b:
        raise ValueError("`b` must not be empty. Pass at least b_0, for example `b=[1.0]`.")
    for pole in _poles(filt):
        if abs(pole) >= 1.0:
            raise ValueError(
                f"The filter a={filt.a} must be stable, but pole {pole:.6g} has modulus "
                f"{abs(pole):.6g} and is not inside the unit circle.{hint} "
                "`scipy.signal.butter` designs stable filters."
            )
    gain = sum(filt.b) - sum(filt.a)
    if not abs(gain - 1.0) <= _GAIN_TOLERANCE:
        raise ValueError(
            f"The gain sum(b) - sum(a) must be 1, got {gain:.9g} for b={filt.b}, a={filt.a}."
            f"{hint} {_rescaling(filt)}"
        )
    if correctable:
        _check_step_response(filt)
    return filt


def _coefficients(name: str, values: ArrayLike) -> tuple[float, ...]:
    wanted = f"`{name}` must be a flat sequence of real numbers, got {values!r}."
    if isinstance(values, Filter | str):
        unpack = "Unpack a filter into b and a, as in `*dpoptax.filters.preset(name)`."
        raise TypeError(f"{wanted} {unpack}")
    array = np.asarray(values)
    if array.ndim != 1 or array.size and array.dtype.kind not in "fiu":
        raise TypeError(wanted)
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)):
        raise ValueError(f"`{name}` must be finite, got {values!r}.")
    return tuple(array.tolist())


def _rescaling(filt: Filter) -> str:
    if sum(filt.b) == 0.0:
        return "Scaling `b` cannot change this, because its sum is 0."
    return f"Scale `b` by {(1.0 + sum(filt.a)) / sum(filt.b):.9g}."


def _check_step_response(filt: Filter) -> None:
    modulus = max(np.abs(_poles(filt)), default=0.0)
    steps = filt.order + 1
    if modulus > 0.0:
        # With a repeated pole the response settles as t^order times a geometric sequence. The
        # factor 2 covers this.
        steps += int(min(_MAX_STEPS, 2 * filt.order * np.log(_SETTLED) / np.log(modulus)))
    kappa = impulse_response(filt, steps)
    response = np.cumsum(kappa)
    # Values that cancel to below the resolution of float32 count as zero.
    bad = np.flatnonzero(response <= _SETTLED * np.cumsum(np.abs(kappa)))
    if bad.size:
        t = int(bad[0])
        raise ValueError(
            "The step response must be positive, because the bias correction divides by it, got "
            f"c_{t} = {response[t]:.6g} at t = {t} for b={filt.b}, a={filt.a}. Choose other "
            "coefficients, or a start without correction."
        )


def _poles(filt: Filter) -> NDArray[np.complex128]:
    """Returns the poles in z, the roots of z^na + Σ a_τ z^{na-τ}; shape (na,)."""
    return np.roots(np.array([1.0, *filt.a])).astype(np.complex128)


def impulse_response(filt: Filter, length: int) -> NDArray[np.float64]:
    """Returns κ_0 … κ_{length-1}, the weights of the input τ steps ago.

    It uses the recursion. DOPPLER eq. (6) writes κ by partial fractions, which requires distinct
    poles.

    >>> impulse_response(preset("momentum"), 3).round(6).tolist()
    [0.1, 0.09, 0.081]
    """
    from scipy import signal  # Imported here because it takes longer than the package.

    impulse = np.zeros(length)
    impulse[:1] = 1.0
    return np.asarray(signal.lfilter(filt.b, [1.0, *filt.a], impulse), np.float64)
