"""Counts the gradients of a run."""

import jax.numpy as jnp

import dpoptax
from experiments.config import ExperimentConfig


def points(config: ExperimentConfig) -> int:
    """Returns the number of gradients per example and step, counting copies."""
    params = {"w": jnp.zeros(2)}
    method = config.method.filter(1.0)
    found = dpoptax.gradient_points(method.init(params), params)
    copies: int = getattr(config.method, "multiplicity", 1)
    return (len(found.points) + (found.tangent is not None)) * copies
