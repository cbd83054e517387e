"""A model of Diffrax."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.catalog import Model


class _Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


def neural_ode() -> Model:
    """Returns the neural ODE of Diffrax's tutorial on 16 points of a path, with fixed steps."""
    field = _Field(eqx.nn.MLP(2, 2, 64, 2, jax.nn.softplus, key=jax.random.key(0)))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    times = jnp.linspace(0.0, 1.0, 16)

    def loss_fn(params, path):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(eqx.combine(params, static)),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=1 / 16,
            y0=path[0],
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.ConstantStepSize(),
            max_steps=32,
            throw=False,  # its error would be a callback of the whole batch
        )
        return jnp.mean((solution.ys - path) ** 2)

    def make_batch(size):
        return jnp.asarray(np.random.default_rng(0).normal(size=(size, 16, 2)).astype(np.float32))

    return Model(loss_fn, params, make_batch, fallback="meets data in custom_vjp_call")
