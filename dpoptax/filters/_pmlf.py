"""DP-PMLF: per-sample momentum before the clip, a low-pass filter after the noise."""

from collections.abc import Sequence

import optax
from jax.typing import DTypeLike

from dpoptax._points.points import track_iterates
from dpoptax._support.argument_checks import check_known
from dpoptax.filters._coefficients import resolve_preset
from dpoptax.filters._low_pass import low_pass


def pmlf(
    length: int = 2,
    beta: float = 0.1,
    b: Sequence[float] | None = None,
    a: Sequence[float] = (),
    *,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Adds DP-PMLF's per-sample momentum and low-pass filter, after the noise stage.

    It clips the weighted sum of an example's gradients at the last k iterates,

        v(ξ) = Σ_{i<k} (β^i / Σ_{j<k} β^j) ∇ℓ(x_{t−i}; ξ),

    recomputed from k stored iterates, not stored per example. The privatized mean is filtered as in
    `doppler`. `dpoptax.gradient_points` passes the points to `dpoptax.clipped_grad`. Before step k,
    x_0 replaces the missing iterates. `length=1` or `beta=0` turns off the momentum and is DOPPLER;
    `b=[1.0]` turns off the filter.

    Privacy: v(ξ) is clipped as one vector, so the cost is that of DP-SGD. Memory:
    k − 1 + max(len(a), len(b) − 1) copies of the parameters. Time: k gradients per example.

    Args:
      length: k, from 1 to 100. The defaults of k and β are those of the paper's experiments.
      beta: β in [0, 1].
      b: feed-forward coefficients b_0, b_1, … `None` means b and a of the paper's experiments on
        MNIST-like data, `dpoptax.filters.preset("pmlf-mnist")`. For CIFAR-like data the paper uses
        "pmlf-cifar".
      a: feedback coefficients a_1, a_2, …, without the leading 1.
      accumulator_dtype: the dtype of the filter's buffers. Defaults to that of the parameters.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: `length` is not from 1 to 100, β is outside [0, 1], `dpoptax.low_pass` does not
        accept the filter, or `a` is given without `b`.

    Source: "Enhancing DPSGD via Per-Sample Momentum and Low-Pass Filtering" (DP-PMLF), Algorithm 1.

    >>> tx = pmlf()  # length=2, beta=0.1, b=[0.1], a=[-0.9]
    """
    b, a = resolve_preset(b, a, "pmlf-mnist")
    weights = momentum_weights(length, beta)
    total = sum(weights)
    smoother = low_pass(b, a, accumulator_dtype=accumulator_dtype)
    return optax.chain(track_last_iterates([w / total for w in weights]), smoother)


def momentum_weights(length: int, beta: float) -> list[float]:
    """Returns the nonzero weights of β^0, …, β^{k−1}."""
    check_known(length=length, beta=beta)
    if not (isinstance(length, int) and 1 <= length <= 100):  # The rows have length² entries.
        raise ValueError(f"`length` must be an integer from 1 to 100, got {length}.")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta` must be in [0, 1], got {beta}.")
    return [beta**i for i in range(length if beta > 0 else 1)]


def track_last_iterates(weights: Sequence[float]) -> optax.GradientTransformation:
    """Tracks the last iterates as points; row i selects x_{t−i}."""
    rows = [[float(i == j) for j in range(len(weights))] for i in range(len(weights))]
    return track_iterates(rows, weights)
