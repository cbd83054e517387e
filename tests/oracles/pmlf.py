"""DP-PMLF, Algorithm 1: per-example momentum before the clip, a low-pass filter after the noise."""

import numpy as np

from tests.oracles import Recursion, private_mean


def pmlf(x0, batches, gradient, *, eta, clip_norm, length, beta, b, a, noise):
    """Lines 1–14.

    The paper does not define the window before step k - 1. Here it holds x_0. This is equivalent to
    renormalizing the weights over the existing iterates if those equal x_0.
    """
    x = np.array(x0, np.float64)
    recursion = Recursion(b, a, x.shape)
    window = [x] * length  # x_t, x_{t-1}, …, x_{t-k+1}
    c_beta = sum(beta**i for i in range(length))  # line 1
    iterates = [x]
    for batch, w in zip(batches, noise, strict=True):  # lines 2 and 3
        window = [x, *window[:-1]] if len(iterates) > 1 else window
        momenta = [  # lines 4 and 5
            sum(beta**i / c_beta * gradient(x_i, example) for i, x_i in enumerate(window))
            for example in batch
        ]
        v = private_mean(momenta, clip_norm, w)  # lines 6–8
        m = recursion(v)  # lines 9–11
        x = x - eta * m  # line 12
        iterates.append(x)
    return np.stack(iterates)
