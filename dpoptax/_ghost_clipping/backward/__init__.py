"""Sums each use of a parameter during the backward pass, for the engines that keep nothing.

Automatic differentiation would sum the gradients of all examples with respect to a parameter. Here,
a `jax.custom_vjp` around each use computes another array from its operand and cotangent. For a
dense layer `y = x @ w` and a batch of B examples, the types are:

- `BatchFunction`: maps `x`, (B, R), and ∂ℓ/∂y, (B, D), to the array that replaces the derivative.
- `UseRunner`: runs the loss with such a function for each use.
- `UseSum`: the function whose result is Σ_i c_i x_iᵀ ∂ℓ_i/∂y, (R, D).
- `UsePlaces`: adds the sums of uses to arrays like the parameters.
- `BatchDevices`: the devices that share the examples.
"""
