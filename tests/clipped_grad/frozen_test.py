"""Tests frozen weights: arguments of the step, not constants of its program."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from tests.helpers import floats, normal

WIDTH = 2048  # 16.8 MB of frozen weights


def loss_fn(params, example):
    hidden = jnp.tanh(example @ params["base"])
    return jnp.sum((hidden @ params["head"]) ** 2)


def problem(width, size=3):
    frozen = {"base": normal(0, (width, width)) / width**0.5}
    return frozen, {"head": normal(1, (width, 2)) / width**0.5}, normal(2, (size, width))


def clipped(frozen, params, batch, **options):
    """Returns the clipped sum of the trained parameters, as in the guide."""
    loss = lambda p, example: loss_fn({**frozen, **p}, example)  # noqa: E731
    return dpoptax.clipped_grad(loss, 0.1, **options)(params, batch).sum


@pytest.mark.parametrize("options", [{}, {"method": "vmap"}, {"microbatch_size": 2}], ids=str)
def test_frozen_arguments_are_not_program_constants(options):
    def step(frozen, params, batch):
        return clipped(frozen, params, batch, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = jax.jit(step).lower(*problem(WIDTH)).as_text()
    constants = re.findall(r"stablehlo.constant dense<.*?> : tensor<([\dx]*)x?[a-z]\w*>", text)
    assert len(constants) > 3
    assert max(np.prod([int(n) for n in sizes.split("x") if n]) for sizes in constants) < 1000


@pytest.mark.parametrize("inner", [False, True], ids=["directly", "in an inner jit"])
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_warns_if_loss_closes_over_large_arrays(method, inner):
    frozen, params, batch = problem(WIDTH)
    hidden = lambda example: jnp.tanh(example @ frozen["base"])  # noqa: E731
    hidden = jax.jit(hidden) if inner else hidden

    def loss(params, example):
        return jnp.sum((hidden(example) @ params["head"]) ** 2)

    grad_fn = dpoptax.clipped_grad(loss, 0.1, method=method)
    with pytest.warns(UserWarning, match=r"closes over 17 MB of arrays.*argument of the jitted"):
        jax.eval_shape(grad_fn, params, batch)


def test_small_constants_do_not_warn():
    frozen, params, batch = problem(16)
    numbers = floats(np.ones(1_000_000))

    def loss(params, example):
        return loss_fn({**frozen, **params}, example) + jnp.sum(numbers)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(dpoptax.clipped_grad(loss, 0.1), params, batch)
