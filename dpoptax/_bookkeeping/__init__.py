"""Clipped sums without per-example gradients: a traced loss is read, measured and summed."""
