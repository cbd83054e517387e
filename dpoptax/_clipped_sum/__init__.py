"""The sealed sum of clipped gradients: made per example, accumulated, and checked."""
