"""The papers' algorithms in NumPy, line by line, with the noise given from outside.

Comments give the line numbers of the paper. Arrays are float64. `gradient(x, example)` is the
gradient of one example's loss, `batches` a list of batches, each a list of examples, and `noise`
has one row a step, with the noise's final standard deviation. Every run returns the iterates
x_0 … x_T as rows. Where a paper has a slip, the comment at the line says what stands there.
"""

import numpy as np


def clip(g, clip_norm):
    """Scale g down to norm `clip_norm` where it is longer."""
    return g * min(1.0, clip_norm / max(np.linalg.norm(g), 1e-300))


def private_mean(gradients, clip_norm, noise):
    """Clip each, average, add noise."""
    return np.mean([clip(g, clip_norm) for g in gradients], axis=0) + noise


class Recursion:
    """Past values of m, g and of the bias correction, as the papers store and combine them."""

    def __init__(self, b, a, shape):
        self.b, self.a = list(b), list(a)
        self.m = [np.zeros(shape) for _ in self.a]
        self.g = [np.zeros(shape) for _ in self.b[1:]]
        self.c_m = [0.0] * len(self.a)
        self.c_g = [0.0] * len(self.b[1:])

    def __call__(self, g):
        """Return m_t / c_t for the input g_t."""
        gs, cs = [g, *self.g], [1.0, *self.c_g]
        m = sum(b * x for b, x in zip(self.b, gs, strict=True))
        m = m - sum(a * x for a, x in zip(self.a, self.m, strict=True))
        c = sum(b * x for b, x in zip(self.b, cs, strict=True))
        c = c - sum(a * x for a, x in zip(self.a, self.c_m, strict=True))
        self.g, self.c_g = gs[: len(self.g)], cs[: len(self.c_g)]
        self.m, self.c_m = [m, *self.m][: len(self.m)], [c, *self.c_m][: len(self.c_m)]
        return m / c
