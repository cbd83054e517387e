"""A model of FlowJAX."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from paramax import NonTrainable, non_trainable, unwrap

from tests.models.catalog import Model


def flow() -> Model:
    """Returns a flow of affine couplings on 8 dimensions, fitted to a density."""
    model = coupling_flow(
        jax.random.key(0), base_dist=non_trainable(Normal(jnp.zeros(8))), flow_layers=4, nn_width=32
    )
    params, static = eqx.partition(
        model, eqx.is_inexact_array, is_leaf=lambda leaf: isinstance(leaf, NonTrainable)
    )

    def loss_fn(params, x):
        return -unwrap(eqx.combine(params, static)).log_prob(x)

    def make_batch(size):
        return jnp.asarray(np.random.default_rng(0).normal(size=(size, 8)).astype(np.float32))

    return Model(loss_fn, params, make_batch)
