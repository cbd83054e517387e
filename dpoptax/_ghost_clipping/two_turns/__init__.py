"""The engine of two turns: runs the loss once for norms, and once for the sum.

For a dense layer `y = x @ w` and a batch of B examples, the types are:

- Lengths: after the first turn, an upper bound of the norm of x_iᵀ ∂ℓ_i/∂y, (B,).
- `PartLimits`: the coefficient of each example, and the longest summand that the second turn may
  add, (B,). They are in `dpoptax._rounding.part_limits`.
- `UseTotal`: Σ_i c_i x_iᵀ ∂ℓ_i/∂y, (R, D), after the second turn.
"""
