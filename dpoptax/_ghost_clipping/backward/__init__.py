"""Sums each use of a parameter during the backward pass, without keeping its factors.

Automatic differentiation would sum the gradients of all examples with respect to a parameter. Here,
a `jax.custom_vjp` around each use computes another array from its operand and cotangent. For a
dense layer `y = x @ w` and a batch of B examples, the types are:

- `BatchFunction`: maps `x`, (B, R), and ∂ℓ/∂y, (B, D), to the array that replaces the derivative.
- `UseSum`: the function whose result is Σ_i c_i x_iᵀ ∂ℓ_i/∂y, (R, D), with c_i from a `Weighing`.
- `PartSums`: runs the loss with such a function for each use, to measure or to sum, and adds the
  sums of uses to arrays like the parameters.
- `BatchDevices`: the devices that share the examples.

There are two engines. `streamed_sum` clips the gradient of `w` by itself, which gives c_i. In
`recomputed_sum`, a first turn gives c_i, (B,), and a limit for each summand of the second turn
(`PartLimits`).
"""
