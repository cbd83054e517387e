"""Adds clipped per-example gradients, weighted by their coefficients.

`ghost_clipped_sum.ghost_clipped_sum` is the entry point. For a dense layer `y = x @ w + b` and a
batch of B examples, the types are:

- `ScaledGradients`: the gradients divided by powers of two. `w` is a `FactoredGradients`, and `b`
  is a formed gradient, (B, D). `Scales` holds the exponents.
- `SumParts`: the parts of one parameter's sum: one contraction for each dense segment, and one
  integer sum for table lookups.
- `GradientSums`: Σ_i c_i G_i, (R, D) for `w`. Formed gradients share vectors, so `b` is a slice of
  a vector.
"""
