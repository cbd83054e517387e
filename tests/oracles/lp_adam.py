"""DOPPLER (Zhang et al. 2024), Algorithm 3: DP-Adam and DP-GaLore with a low-pass filter."""

import numpy as np

from tests.oracles import Recursion, private_mean


def find_projector(g, rank):
    """Line 8: the `rank` leading left singular vectors of the gradient matrix (GaLore)."""
    return np.linalg.svd(g, full_matrices=False)[0][:, :rank]


def lp_adam(
    x0,
    batches,
    gradient,
    *,
    eta,
    clip_norm,
    b,
    a,
    beta,
    eps,
    noise,
    rank=None,
    interval=1,
    noise_variance=0.0,
):
    """Lines 1–26; with `rank` also the GaLore lines, for a matrix x of (rows, columns).

    `beta` is the weight of the *new* square, as printed in line 14. `noise_variance` is subtracted
    from the second moment before the root. This is DP-AdamBC (Tang et al. 2024), which the listing
    does not contain.
    """
    x = np.array(x0, np.float64)
    low = x.shape if rank is None else (rank, x.shape[1])
    recursion, v = Recursion(b, a, low), np.zeros(low)  # line 2
    iterates, projector = [x], None
    for t, (batch, w) in enumerate(zip(batches, noise, strict=True)):  # lines 3 and 4
        g = private_mean([gradient(x, example) for example in batch], clip_norm, w)  # line 5
        if rank is not None:  # line 6
            if t % interval == 0:  # line 7
                projector = find_projector(g, rank)  # line 8
            g = projector.T @ g  # line 10
        v = (1 - beta) * v + beta * g**2  # line 14: of the unfiltered gradient
        m = recursion(g)  # lines 15–17
        # Line 18 prints v_t/(1 - β^t), which does not fit line 14. There the weights of the squares
        # sum to 1 - (1 - β)^{t+1}, with t counted from 0.
        v_hat = v / (1 - (1 - beta) ** (t + 1))
        root = np.sqrt(np.maximum(v_hat - noise_variance, 0.0))
        d = m / np.maximum(root, eps)  # line 19: the maximum, not Adam's sum
        d = d if rank is None else projector @ d  # lines 20–24
        x = x - eta * d  # line 25
        iterates.append(x)
    return np.stack(iterates)
