"""DP-AdaFEST (Ghazi et al., 2023, Algorithm 1) in NumPy, by example and without noise.

Gradients are restricted to the selected rows and then clipped. The model is the mean of the
looked-up rows, times weights, plus a bias. The loss is half the squared error.
"""

import numpy as np


def contributions(lookups, size, bound):
    """The contribution map of one example: its rows, clipped to an l2 norm of √bound."""
    rows = sorted({int(j) for j in np.ravel(lookups) if 0 <= j < size})
    counts = np.zeros(size)
    counts[rows] = 1.0
    length = np.linalg.norm(counts)
    return counts * min(1.0, np.sqrt(bound) / length) if rows else counts


def gradient(params, lookups, target):
    """Returns one example's gradients by table, weights and bias."""
    table, weights, bias = params["table"], params["weights"], params["bias"]
    inside = [int(j) for j in lookups if 0 <= j < len(table)]
    mean = sum((table[j] for j in inside), np.zeros(table.shape[1])) / len(lookups)
    error = mean @ weights + bias - target
    by_table = np.zeros_like(table)
    for j in inside:
        by_table[j] += error * weights / len(lookups)
    return {"table": by_table, "weights": error * mean, "bias": np.asarray(error)}


def step(params, lookups, targets, mask, *, threshold, bound, clip_norm, batch_size, rate):
    """Takes one step; also returns the selected rows."""
    size = len(params["table"])
    used = [i for i in range(len(targets)) if mask[i]]
    counts = sum((contributions(lookups[i], size, bound) for i in used), np.zeros(size))
    selected = np.flatnonzero(counts >= threshold)
    total = {name: np.zeros_like(value) for name, value in params.items()}
    for i in used:
        found = gradient(params, lookups[i], targets[i])
        kept = np.zeros_like(found["table"])
        kept[selected] = found["table"][selected]
        found["table"] = kept
        norm = np.sqrt(sum(np.sum(value**2) for value in found.values()))
        for name, value in found.items():
            total[name] += value * min(1.0, clip_norm / norm)
    return {name: params[name] - rate * total[name] / batch_size for name in params}, selected
