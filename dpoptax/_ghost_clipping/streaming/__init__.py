"""The engine of streaming: clips and sums each use of a parameter during the backward pass.

It requires a clip whose factor for one part of the gradient does not depend on other parts. For a
dense layer `y = x @ w` and a batch of B examples, the types are:

- `Part`: the share of the bound for `w`.
- `UseClip`: computes c_i, (B,), from `x` and ∂ℓ/∂y, and then Σ_i c_i x_iᵀ ∂ℓ_i/∂y, (R, D).
"""
