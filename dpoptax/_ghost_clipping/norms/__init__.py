"""Bounds the norms of per-example gradients from their factors.

For a dense layer `y = x @ w + b` and a batch of B examples, the types are:

- `Segment`: the factors that one use has at one gradient point. `rows` is `x` as (B, K, T, R) = (B,
  1, 1, R), and `columns` is ∂ℓ/∂y as (B, 1, 1, C). Example i has the gradient Σ_t rows_tᵀ
  columns_t. With T tokens or pixels instead of one vector, T is the third axis.
- `FactoredGradients`: the segments of one parameter. It also has a `MeasuredTerm` for each fixed
  array times a few numbers per example, which appear if `w` was normalized before its use.
- `OuterProducts` and `FixedTerm`: the same two forms while the chain rule pulls a gradient back
  from a derived value to its parameter. `FactoredCotangent` is their sum.
- `GradientSize` (in `dpoptax._clip.bounds`): upper bounds of ‖G_i‖² and of S_i = Σ_t
  ‖rows_t‖‖columns_t‖, (B,) each.
"""
