"""Computes clipped sums in micro-batches, on one or many devices. `rewrites` serves XLA."""
