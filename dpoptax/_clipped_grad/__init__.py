"""`clipped_grad`: microbatches, devices, randomness, around the two ways to a clipped sum."""
