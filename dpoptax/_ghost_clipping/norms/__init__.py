"""Bounds the norms of per-example gradients from their factors.

For a dense layer `y = x @ w + b` and a batch of B examples, the types are:

- `Segment`: the factors of one use at one gradient point. `rows` is `x` as (B, K, L, R) = (B, 1, 1,
  R), and `columns` is ∂ℓ/∂y as (B, 1, 1, D). Example i has the gradient Σ_t rows_tᵀ columns_t. For
  L tokens or pixels instead of one vector, L is the third axis.
- `FactoredGradients`: the segments of one parameter.
- `NormBounds` (in `dpoptax._rounding.bounds`): upper bounds of ‖G_i‖² and of S_i = Σ_t
  ‖rows_t‖‖columns_t‖, (B,) each.
"""
