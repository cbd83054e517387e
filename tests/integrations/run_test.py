"""Tests parts of private steps that the trainers of other libraries share."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.integrations import _run


def test_digest_of_a_step_does_not_warn_of_frozen_weights():
    """The step that trains gets them as arguments, so the user has nothing to change."""
    plan = dpoptax.PrivacyPlan(dataset_size=8, batch_size=4, steps=2, noise_multiplier=1.0)
    frozen, params = jnp.ones((2100, 2000)), jnp.ones(2000)
    tx = optax.chain(plan.new_run().noise(), optax.sgd(0.1))
    data, state = _run.PlanBatches(plan, np.ones((8, 2100), np.float32)), tx.init(params)

    def step(opt_state, params, inputs):
        options = {"plan": plan, "clip": 1.0, "rows": None, "specs": None}
        return _run.update(
            lambda params, x, key: x @ (frozen @ params), tx, opt_state, params, inputs, **options
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _run.program_of(step, data, state, params)
