"""Design and analysis of low-pass filters (b, a) for privatized gradients.

A filter has two tuples of coefficients, with which

    m_t = -Σ_{τ=1}^{na} a_τ m_{t-τ} + Σ_{τ=0}^{nb} b_τ g_{t-τ} = Σ_{τ≥0} κ_τ g_{t-τ},

where g_t is the input (the privatized gradient of step t), m_t is the output and κ is the impulse
response. `a` omits the leading 1 of scipy's convention: `scipy.signal.lfilter(b, [1, *a], g)`
computes the same m. Frequencies are in radians per step, in [0, π].

Filters are post-processing and do not change a privacy guarantee.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax.filters import spectrum as spectrum
    from dpoptax.filters._coefficients import Filter as Filter
    from dpoptax.filters._coefficients import impulse_response as impulse_response
    from dpoptax.filters._coefficients import poles as poles
    from dpoptax.filters._coefficients import preset as preset
    from dpoptax.filters._coefficients import presets as presets
    from dpoptax.filters._coefficients import validate as validate
    from dpoptax.filters._kalman import kalman_gain as kalman_gain
    from dpoptax.filters._responses import butterworth as butterworth
    from dpoptax.filters._responses import chebyshev as chebyshev
    from dpoptax.filters._responses import effective_snr as effective_snr
    from dpoptax.filters._responses import frequency_response as frequency_response
    from dpoptax.filters._responses import group_delay as group_delay
    from dpoptax.filters._responses import noise_gain as noise_gain
    from dpoptax.filters._responses import optimal_fir as optimal_fir
    from dpoptax.filters._responses import snr as snr
    from dpoptax.filters._responses import step_response as step_response
    from dpoptax.filters._responses import zeros as zeros
else:
    from dpoptax._support.lazy import lazy_names

    _FILES = {
        ".": ("spectrum",),
        "._coefficients": ("Filter", "impulse_response", "poles", "preset", "presets", "validate"),
        "._kalman": ("kalman_gain",),
        "._responses": (
            "butterworth",
            "chebyshev",
            "effective_snr",
            "frequency_response",
            "group_delay",
            "noise_gain",
            "optimal_fir",
            "snr",
            "step_response",
            "zeros",
        ),
    }
    __getattr__, __dir__, __all__ = lazy_names(__name__, _FILES)
