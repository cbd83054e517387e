"""A small random non-convex problem in float64, and how the library and an oracle solve it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax

STEPS, BATCH, CLIP = 50, 4, 0.8


def loss_fn(x, example):
    """Tanh regression with a ripple: ½ ‖tanh(u x) - v‖² + 0.1 Σ cos(2x), x a vector or a matrix."""
    u, v = example
    return 0.5 * jnp.sum((jnp.tanh(u @ x) - v) ** 2) + 0.1 * jnp.sum(jnp.cos(2.0 * x))


_gradient = jax.jit(jax.grad(loss_fn))
_product = jax.jit(lambda x, e, d: jax.jvp(lambda y: jax.grad(loss_fn)(y, e), (x,), (d,))[1])


def gradient(x, example):
    with jax.enable_x64(True):
        return np.asarray(_gradient(x, example))


def hessian_product(x, example, d):
    with jax.enable_x64(True):
        return np.asarray(_product(x, example, d))


class Problem(NamedTuple):
    """The first iterate, the examples (u, v) by step and place, and the noise of each step."""

    x0: np.ndarray
    u: np.ndarray
    v: np.ndarray
    noise: np.ndarray

    def solve(self, oracle, **arguments):
        """Returns the iterates of an oracle."""
        batches = [list(zip(*batch, strict=True)) for batch in zip(self.u, self.v, strict=True)]
        return oracle(self.x0, batches, gradient, **arguments)

    def run(self, *transforms, clip=CLIP):
        """Returns the iterates of transforms that get clipped means with the given noise."""
        tx = optax.chain(*transforms)
        grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(clip))

        def step(carry, inputs):
            x, state = carry
            *batch, noise = inputs
            mean = grad_fn(dpoptax.gradient_points(state, x), batch).sum / BATCH + noise
            updates, state = tx.update(mean, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), x

        with jax.enable_x64(True):
            x0, *inputs = map(jnp.asarray, self)
            _, xs = jax.lax.scan(step, (x0, tx.init(x0)), tuple(inputs))
            return np.concatenate([self.x0[None], xs])


def make(*shape):
    """Returns a problem with x of the given shape."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(STEPS, BATCH, shape[0]))
    v = rng.normal(size=(STEPS, BATCH, *shape[1:]))
    return Problem(rng.normal(size=shape), u, v, 0.05 * rng.normal(size=(STEPS, *shape)))


def assert_same(got, want, atol=1e-6):
    assert np.abs(np.diff(want, axis=0)).max() > 1e-2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol)
