"""Coefficients (b, a) of low-pass filters for privatized gradients.

A filter has two tuples of coefficients, with which

    m_t = -Σ_{τ=1}^{na} a_τ m_{t-τ} + Σ_{τ=0}^{nb} b_τ g_{t-τ} = Σ_{τ≥0} κ_τ g_{t-τ},

where g_t is the input (the privatized gradient of step t), m_t is the output and κ is the impulse
response. `a` omits the leading 1 of scipy's convention: `scipy.signal.lfilter(b, [1, *a], g)`
computes the same m. With `[1, *a]`, `scipy.signal.freqz` has the frequency response, and
`scipy.signal.butter` and `cheby1` design filters.

Filters are post-processing and do not change a privacy guarantee.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax.filters import spectrum as spectrum
    from dpoptax.filters._coefficients import Filter as Filter
    from dpoptax.filters._coefficients import impulse_response as impulse_response
    from dpoptax.filters._coefficients import preset as preset
    from dpoptax.filters._coefficients import presets as presets
    from dpoptax.filters._coefficients import validate as validate
    from dpoptax.filters._kalman import kalman_gain as kalman_gain
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
