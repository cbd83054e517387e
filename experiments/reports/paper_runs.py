"""Counts the gradients of a run."""

import jax.numpy as jnp

import dpoptax
from dpoptax.training.run.chain import build_chain
from dpoptax.training.run.seeds import Keys
from experiments.config import ExperimentConfig


def points(config: ExperimentConfig) -> int:
    """Returns the number of gradients per example and step, counting copies."""
    params = {"w": jnp.zeros(2)}
    chain = build_chain(config, 1.0, Keys.fixed("threefry"))
    found = dpoptax.gradient_points(chain.release.init(params), params)
    copies: int = getattr(config.method, "multiplicity", 1)
    return (len(found.points) + (found.tangent is not None)) * copies
