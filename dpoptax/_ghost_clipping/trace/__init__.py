"""Reads a traced loss: finds where its parameters meet the data of an example.

`read_program.read_program` is the entry point. For a dense layer `y = x @ w + b` with `x` of shape
(R,), `w` of shape (R, D) and `b` of shape (D,), the types are:

- `DerivedValue`: a value computed from parameters and constants only, such as `w` and `b`. It is
  equal for all examples. Its `View` says which entries of a parameter it holds.
- `PrivateValue`: a value that may depend on the example, such as `x` and `y`.
- `Use`: one operation where a derived value meets a private one, here `x @ w`. Its `Rule` (`Dot`)
  maps operand and cotangent to factors, and its `FactorLayout` reads `w` as (K, R, D) with K = 1.
- `Program`: the steps of the loss and all its uses. `b` has no use: adding it to data makes it
  `opaque`, and automatic differentiation gives its per-example gradient.
"""
