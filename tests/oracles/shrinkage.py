"""Shrinkage under known noise, transcribed in the papers' normalization."""

import numpy as np


def optimal_shrinker(y, beta):
    """Gavish and Donoho (2017), eq. (7): for noise of variance 1/n and β = m/n ≤ 1."""
    if y < 1 + np.sqrt(beta):
        return 0.0
    return np.sqrt((y**2 - beta - 1) ** 2 - 4 * beta) / y


def spike(y, beta):
    """Inverts their eq. (2): the signal's singular value x observed at y > 1 + √β."""
    inside = y**2 - beta - 1
    return np.sqrt((inside + np.sqrt(inside**2 - 4 * beta)) / 2)


def product_of_cosines(y, beta):
    """Their eq. (3): the left cosine with β times the right cosine with 1, at the signal's x."""
    if y < 1 + np.sqrt(beta):
        return 0.0
    x = spike(y, beta)
    left = np.sqrt((x**4 - beta) / (x**4 + beta * x**2))
    right = np.sqrt((x**4 - beta) / (x**4 + x**2))
    return left * right


def of_singular_values(function, matrix, stddev):
    """Returns U diag(√n σ f(s/(√n σ))) Vᵀ, with n the longer side; cosines have no unit."""
    short, long = sorted(matrix.shape)
    unit = np.sqrt(long) * stddev
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    new = np.array([function(s / unit, short / long) for s in values])
    scale = unit if function is optimal_shrinker else 1.0
    return scale * (left * new) @ right


def james_stein(g, stddev):
    """James and Stein's positive-part estimator of the mean of g."""
    if g.size <= 2:
        return g
    return max(0.0, 1 - (g.size - 2) * stddev**2 / np.sum(g**2)) * g


class RunningMean:
    """Computes m_t = Σ β^i g_{t−i} / Σ β^i from its weights, and √Σw², the remaining noise."""

    def __init__(self, decay):
        """Starts without gradients."""
        self.decay, self.seen = decay, []

    def __call__(self, g):
        """Returns the mean after one more gradient."""
        self.seen.append(g)
        weights = self.decay ** np.arange(len(self.seen))
        weights /= weights.sum()
        mean = sum(w * x for w, x in zip(weights, self.seen[::-1], strict=True))
        return mean, np.sqrt(np.sum(weights**2))
