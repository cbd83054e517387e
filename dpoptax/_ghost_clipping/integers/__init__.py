"""The engine of integers: ghost clipping whose products and sums are exact.

For a dense layer `y = x @ w` and a batch of B examples, the types are:

- `IntegerGrid`: the unit g of the sum, and the limit of a contribution's squared norm.
- `IntegerFactors`: `x` in 8 bits, (B, 1, 1, R), and the weighted ∂ℓ/∂y in 16 bits, (B, 1, 1, D).
- The sum for `w`: (R, D) in int32, in units of g.
"""
