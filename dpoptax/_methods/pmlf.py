"""DP-PMLF: momentum per sample before the clip, a low-pass filter behind the noise."""

from collections.abc import Sequence

import optax
from jax.typing import DTypeLike

from dpoptax._points import track_iterates
from dpoptax._tree import check_known
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
    """DP-PMLF's per-sample momentum and low-pass filter, for the chain behind the noise.

    The per-example quantity that is clipped is the same example's gradients at the last k iterates,

        v(ξ) = Σ_{i<k} (β^i / Σ_{j<k} β^j) ∇ℓ(x_{t−i}; ξ),

    recomputed from k stored iterates rather than kept per example; the privatized mean is filtered
    as in `doppler`. The points reach `dpoptax.clipped_grad` through `dpoptax.gradient_points`.
    Before step k the missing iterates are x_0. With `length=1` or `beta=0` there is no momentum and
    the method is DOPPLER, with `b=[1.0]` there is no filter.

    Privacy: v(ξ) is clipped as one vector, so the cost is that of DP-SGD. Memory: k − 1 +
    max(len(a), len(b) − 1) copies of the parameters. Time: k gradients an example.

    Args:
      length: k, at least 1. The default is that of the paper's experiments, like that of β.
      beta: β in [0, 1].
      b: the filter's feed-forward coefficients b_0, b_1, … `None` means b and a of the paper's
        experiments on MNIST-like data, `dpoptax.filters.preset("pmlf-mnist")`. On CIFAR-like
        data the paper uses "pmlf-cifar".
      a: its feedback coefficients a_1, a_2, …, without the leading 1.
      accumulator_dtype: the dtype of the filter's buffers; by default the parameters'.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: `length` below 1, β outside [0, 1], a filter that `dpoptax.low_pass`
        refuses, or `a` without `b`.

    Source: "Enhancing DPSGD via Per-Sample Momentum and Low-Pass Filtering" (DP-PMLF), Algorithm 1.

    >>> tx = pmlf()  # length=2, beta=0.1, b=[0.1], a=[-0.9]
    """
    b, a = resolve_preset(b, a, "pmlf-mnist")
    weights = momentum_weights(length, beta)
    total = sum(weights)
    smoother = low_pass(b, a, accumulator_dtype=accumulator_dtype)
    return optax.chain(track_last_iterates([w / total for w in weights]), smoother)


def momentum_weights(length: int, beta: float) -> list[float]:
    """β^0, …, β^{k−1}, without those that are zero."""
    check_known(length=length, beta=beta)
    if not (isinstance(length, int) and length >= 1):
        raise ValueError(f"length={length}: want an integer, at least 1")
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta}: want a number in [0, 1]")
    return [beta**i for i in range(length if beta > 0 else 1)]


def track_last_iterates(weights: Sequence[float]) -> optax.GradientTransformation:
    """The last iterates as points: row i picks x_{t−i}."""
    rows = [[float(i == j) for j in range(len(weights))] for i in range(len(weights))]
    return track_iterates(rows, weights)
