"""Scale-then-privatize (Ganesh, McMahan, Thakurta 2025), Algorithm 8, with this library's options.

The steps follow jax_privacy's documentation: s = 1/(√v_{t−1} + ε), clip s ⊙ g, add noise, divide by
s, and update v as in Adam. In addition, v is bias-corrected and ε is relative to the root mean
square of the roots. The scales s may be normalized to Σ 1/s² = d.
"""

import numpy as np

from tests.oracles import private_mean


def denominator(v_hat, eps, power):
    """Returns d for one scale per entry."""
    root = np.maximum(v_hat, 0.0) ** power
    return root + eps * np.sqrt(np.mean(root**2))


def of_sides(v_hat, eps, power):
    """Returns d of a kernel (R, C), one scale per row and column, from Adafactor's factors."""
    rows, columns, mean = v_hat.mean(axis=1), v_hat.mean(axis=0), v_hat.mean()
    typical = np.sqrt(np.mean((np.outer(rows, columns) / mean) ** (2 * power)))
    sides = np.outer((rows / mean) ** power + eps, (columns / mean) ** power + eps)
    return sides * (mean**power + eps * typical)


def scale_then_privatize(
    x0, batches, gradient, *, eta, clip_norm, b1, b2, eps_adam, noise,
    eps, scale_b2, power=0.5, normalized=False, every=1, noise_variance=0.0,
    denominator=denominator,
):  # fmt: skip
    """Returns the iterates of Adam after scaling; x is an array of any shape."""
    x = np.array(x0, np.float64)
    m, v, v_scale, total = (np.zeros(x.shape) for _ in range(4))
    s, iterates = np.ones(x.shape), [x]
    for t, (batch, w) in enumerate(zip(batches, noise, strict=True), start=1):
        g = private_mean([s * gradient(x, example) for example in batch], clip_norm, w) / s
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        x = x - eta * m_hat / (np.sqrt(v_hat) + eps_adam)
        total = total + g
        if t % every == 0:
            square = (total / every) ** 2 - noise_variance / s**2 / every
            v_scale = scale_b2 * v_scale + (1 - scale_b2) * square
            total = np.zeros(x.shape)
            d = denominator(v_scale / (1 - scale_b2 ** (t // every)), eps, power)
            s = (np.sqrt(np.mean(d**2)) if normalized else 1.0) / d
        iterates.append(x)
    return np.stack(iterates)
