"""GeoDP (Duan et al. 2025), eq. (24)–(27) and Algorithm 1."""

import math

import numpy as np


def to_spherical(g):
    """Eq. (24)–(26): magnitude ‖g‖ and direction θ_1 … θ_{d-1}."""
    d = len(g)
    magnitude = math.sqrt(math.fsum(x * x for x in g))  # eq. (24)
    theta = np.zeros(d - 1)
    for z in range(d - 1):  # eq. (25); its index is z + 1
        if z < d - 2:
            theta[z] = math.atan2(math.sqrt(math.fsum(x * x for x in g[z + 1 :])), g[z])
        else:
            theta[z] = math.atan2(g[z + 1], g[z])
    return magnitude, theta


def to_rectangular(magnitude, theta):
    """Eq. (27)."""
    d = len(theta) + 1
    g = np.zeros(d)
    product = 1.0
    for z in range(d - 1):
        g[z] = magnitude * product * math.cos(theta[z])
        product *= math.sin(theta[z])
    g[d - 1] = magnitude * product
    return g


def geodp_step(w, per_example_gradients, *, clip_norm, beta, learning_rate, noise):
    """One iteration of Algorithm 1, lines 5–10.

    `noise` is (n_0, n_1 … n_{d-1}) with standard deviation σ, for the magnitude and the angles.
    """
    batch_size, d = per_example_gradients.shape
    norms = np.linalg.norm(per_example_gradients, axis=1, keepdims=True)
    clipped = per_example_gradients / np.maximum(1.0, norms / clip_norm)
    g = clipped.mean(axis=0)  # line 5
    magnitude, theta = to_spherical(g)  # line 6
    # Line 7 bounds the privacy region: Δθ_z = βπ and Δθ_{d-1} = 2βπ, in total √(d+2)·βπ. It sets
    # the scale in line 8 but does not change any angle, because the region is centered at θ.
    magnitude = magnitude + clip_norm / batch_size * noise[0]  # line 8
    theta = theta + math.sqrt(d + 2) * beta * math.pi / batch_size * noise[1:]
    g = to_rectangular(magnitude, theta)  # line 9
    return w - learning_rate * g  # line 10
