"""Runs a traced program forward and backward at every gradient point.

`record_points.record_points` is the entry point. For a dense layer `y = x @ w + b` and a batch of B
examples, the types are:

- `PointRecord`: the arrays of one point. For the use `x @ w`, `operands` holds `x`, (B, R), and
  `cotangents` holds ∂ℓ/∂y, (B, D). For the opaque `b`, `gradients` holds ∂ℓ/∂b, (B, D).
- `Records`: the `PointRecord` of each point.
- `WeightedPair`: operand, cotangent and weight. Their products add up to the gradient of a use.
- `ParameterEvaluator`: computes derived values, such as a normalized `w`, at given parameters.
"""
