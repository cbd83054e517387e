"""Adam with noise correction but without a low-pass filter."""

import optax

from dpoptax._support.argument_checks import check_decays
from dpoptax.filters._lp_adam import lp_adam


def adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    *,
    stddev: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float | None = None,
) -> optax.GradientTransformation:
    """Applies DP-AdamBC, which corrects Adam's second moment for the noise.

        update_t = −learning_rate · m̂_t / max(√max(v̂_t − stddev², 0), eps)

    If the noise outweighs the gradients, Adam's v̂ is about stddev² everywhere and Adam is SGD with
    momentum. Without that term the denominators differ again. This is `scale_by_lp_adam` with
    b = (1 − b1,), a = (−b1,), and its units, privacy and defaults.

    Args:
      learning_rate: a number or a schedule.
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: the smallest denominator; the paper's γ′ is its square.

    Raises:
      ValueError: a number is out of range.

    Source: Tang et al., "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
    Correction)", 2024, Algorithm 1.

    >>> tx = adam_bc(1e-3, stddev=1.1 * 1.0 / 256)
    """
    check_decays(b1=b1)
    return lp_adam(learning_rate, (1.0 - b1,), (-b1,), b2=b2, eps=eps, stddev=stddev)
