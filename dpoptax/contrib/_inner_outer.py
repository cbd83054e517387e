"""Inner-outer momentum, per sample before the clip and over time after the noise."""

import optax

from dpoptax._support.argument_checks import check_decays
from dpoptax.filters._pmlf import momentum_weights, track_last_iterates


def inner_outer(length: int, beta: float, momentum: float) -> optax.GradientTransformation:
    """Applies inner-outer momentum, DP-PMLF's baseline, without normalization.

    It clips v(ξ) = Σ_{i<k} β^i ∇ℓ(x_{t−i}; ξ), and accumulates the privatized mean v̄_t as
    m_t = momentum · m_{t−1} + v̄_t, which is `optax.trace`. The effective step is up to
    1/(1 − momentum) times that of DP-SGD, so tune the learning rate of each for a comparison.

    Privacy: v(ξ) is clipped as one vector, so the cost is that of DP-SGD. Memory: k copies of the
    parameters.

    Args:
      length: k, from 1 to 100.
      beta: β in [0, 1], the inner momentum.
      momentum: the outer momentum, in [0, 1).

    Raises:
      ValueError: `length` is not from 1 to 100, β is outside [0, 1], or `momentum` is outside
        [0, 1).

    Source: Xiao et al., 2023, as described in DP-PMLF ("Mitigating Clipping Bias").

    >>> tx = inner_outer(length=2, beta=0.5, momentum=0.9)
    """
    check_decays(momentum=momentum)
    points = track_last_iterates(momentum_weights(length, beta))
    return optax.chain(points, optax.trace(momentum))
