"""NumPy transcriptions of the papers' algorithms, line by line, with given noise.

Comments give the line numbers of the paper. Arrays are float64. `gradient(x, example)` is the
gradient of one example's loss. `batches` is a list of batches, each a list of examples. `noise` has
one row per step, with the final standard deviation of the noise. Every run returns the iterates x_0
… x_T as rows. Where a paper has an error, a comment quotes the printed line.
"""

import numpy as np


def clip(g, clip_norm):
    """Scales g down to norm `clip_norm` if it is longer."""
    return g * min(1.0, clip_norm / max(np.linalg.norm(g), 1e-300))


def private_mean(gradients, clip_norm, noise):
    """Clips each gradient, averages them and adds noise."""
    return np.mean([clip(g, clip_norm) for g in gradients], axis=0) + noise


class Recursion:
    """Stores and combines past values of m, g and the bias correction, as in the papers."""

    def __init__(self, b, a, shape):
        self.b, self.a = list(b), list(a)
        self.m = [np.zeros(shape) for _ in self.a]
        self.g = [np.zeros(shape) for _ in self.b[1:]]
        self.c_m = [0.0] * len(self.a)
        self.c_g = [0.0] * len(self.b[1:])

    def __call__(self, g):
        """Returns m_t / c_t for the input g_t."""
        gs, cs = [g, *self.g], [1.0, *self.c_g]
        m = sum(b * x for b, x in zip(self.b, gs, strict=True))
        m = m - sum(a * x for a, x in zip(self.a, self.m, strict=True))
        c = sum(b * x for b, x in zip(self.b, cs, strict=True))
        c = c - sum(a * x for a, x in zip(self.a, self.c_m, strict=True))
        self.g, self.c_g = gs[: len(self.g)], cs[: len(self.c_g)]
        self.m, self.c_m = [m, *self.m][: len(self.m)], [c, *self.c_m][: len(self.c_m)]
        return m / c
