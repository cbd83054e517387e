"""Adds clipped per-example gradients, weighted by their coefficients."""
