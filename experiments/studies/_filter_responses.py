"""Computes time and frequency responses of the papers' filters (DOPPLER Fig. 6)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import signal

from dpoptax import filters


class FilterResponses(NamedTuple):
    """Time and frequency responses of filters, by name; DOPPLER Fig. 6.

    Attributes:
      omega: the frequencies in radians per step, (n,).
      kappa: the impulse response κ_0, κ_1, … of each filter, (length,).
      decibel: 20 log10 |H(e^{iω})| of each filter, (n,), cut off at -100.
    """

    omega: NDArray[np.float64]
    kappa: dict[str, NDArray[np.float64]]
    decibel: dict[str, NDArray[np.float64]]


DOPPLER_TABLE_2 = (
    "none",
    "momentum",
    "doppler-first-order-1",
    "doppler-first-order-2",
    "doppler-second-order",
)
"""Names of the filters of DOPPLER's Table 2, for `filters.preset`."""
DOPPLER_TABLE_4 = tuple(f"doppler-f{i}" for i in range(1, 7))
"""Names of the filters of DOPPLER's Table 4, for `filters.preset`."""


def filter_responses(
    names: Sequence[str] = DOPPLER_TABLE_2, *, length: int = 31, points: int = 400
) -> FilterResponses:
    """Returns the responses of DOPPLER Fig. 6: (a, b) for Table 2, (c, d) for Table 4.

    >>> filter_responses(DOPPLER_TABLE_4).kappa["doppler-f4"].max().round(2).item()
    0.32
    """
    omega = np.geomspace(1e-3, math.pi, points)
    chosen = {name: filters.preset(name) for name in names}
    amplitude = {
        name: np.abs(signal.freqz(f.b, [1, *f.a], worN=omega)[1]) for name, f in chosen.items()
    }
    return FilterResponses(
        omega,
        {name: filters.impulse_response(f, length) for name, f in chosen.items()},
        {name: 20 * np.log10(np.maximum(a, 1e-5)) for name, a in amplitude.items()},
    )
