"""Counts of rows (Ghazi et al., 2023, Algorithm 1) in NumPy, by example, and gradients by rows.

The model is the mean of the looked-up rows, times weights, plus a bias. The loss is half the
squared error.
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
