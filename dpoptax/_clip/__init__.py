"""Clips, bounds on norms as they are rounded, and the sealed sum of clipped gradients."""
