"""A model of NumPyro."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density

from tests.models.catalog import Model


def density() -> Model:
    """Returns a mixture of Gaussians and a regression, whose density NumPyro's handlers compute."""

    def model(x, y):
        weights = numpyro.param("weights", jnp.zeros(4))
        means = numpyro.param("means", jnp.asarray(np.eye(4, 6), jnp.float32))
        scales = numpyro.param("scales", jnp.zeros((4, 6)))
        parts = dist.Normal(means, jnp.exp(scales)).to_event(1)
        mixture = dist.MixtureSameFamily(dist.Categorical(logits=weights), parts)
        numpyro.sample("x", mixture, obs=x)
        slope = numpyro.param("slope", jnp.zeros(6))
        numpyro.sample("y", dist.StudentT(4.0, x @ slope, 1.0), obs=y)

    def loss_fn(params, example):
        return -log_density(model, example, {}, params)[0]

    def make_batch(size):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(size, 6)), rng.normal(size=size)
        return jnp.asarray(x.astype(np.float32)), jnp.asarray(y.astype(np.float32))

    example = jax.tree.map(lambda x: x[0], make_batch(1))
    with numpyro.handlers.trace() as trace, numpyro.handlers.seed(rng_seed=0):
        model(*example)
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    return Model(loss_fn, params, make_batch)
