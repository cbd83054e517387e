"""A small random non-convex problem, in NumPy for the oracles and in JAX for the library."""

import jax.numpy as jnp
import numpy as np


def loss_fn(x, example):
    """ℓ(x; (z, y)) = ½(tanh(z·x) - y)² + 0.05 Σ_i cos(2x_i), for x (d,), z (d,) and scalar y."""
    z, y = example
    return 0.5 * (jnp.tanh(z @ x) - y) ** 2 + 0.05 * jnp.sum(jnp.cos(2 * x))


def gradient(x, example):
    """Returns the gradient of `loss_fn` in x."""
    z, y = example
    s = np.tanh(z @ x)
    return (s - y) * (1 - s**2) * z - 0.1 * np.sin(2 * x)


def hessian_product(x, example, d):
    """Returns the Hessian of `loss_fn` in x, times d."""
    z, y = example
    s = np.tanh(z @ x)
    curvature = (1 - s**2) ** 2 - 2 * s * (1 - s**2) * (s - y)
    return curvature * (z @ d) * z - 0.2 * np.cos(2 * x) * d


def batches(seed, *, steps=50, batch_size=6, d=8):
    """Returns `steps` batches of examples (z, y) in float64."""
    rng = np.random.default_rng(seed)
    return [[(rng.normal(size=d), rng.normal()) for _ in range(batch_size)] for _ in range(steps)]


def as_arrays(batch):
    """Returns one batch as the arrays (B, d) and (B,) that a JAX loss maps over."""
    return jnp.stack([jnp.asarray(z, jnp.float32) for z, _ in batch]), jnp.array(
        [y for _, y in batch], jnp.float32
    )
