"""Tests which arrays of the backward pass are stored for norms and sums."""

import jax
import jax.numpy as jnp

import dpoptax
from dpoptax._support.jaxprs import subprograms

EXAMPLES, TOKENS, WIDTH = 3, 48, 200
SHAPES = {"frozen": (WIDTH, WIDTH), "a": (WIDTH, 2), "b": (2, WIDTH)}


def _loss(params, tokens):
    hidden = jnp.tanh(tokens @ params["frozen"] + tokens @ params["a"] @ params["b"])
    return jnp.sum(hidden**2)


def _stored(trained):
    """Returns the shapes of arrays that pass barriers if only some parameters are trained."""
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    frozen = {name: x for name, x in params.items() if name not in trained}
    points = {name: params[name] for name in trained}
    grad_fn = dpoptax.clipped_grad(lambda own, tokens: _loss({**frozen, **own}, tokens), 1.0)
    batch = jnp.zeros((EXAMPLES, TOKENS, WIDTH)), jnp.ones(EXAMPLES, bool)
    found = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                found.update(x.aval.shape for x in eqn.invars)
            for inner in subprograms(eqn.params):
                visit(inner)

    visit(jax.make_jaxpr(grad_fn)(points, *batch).jaxpr)
    return found


def test_stores_small_gradients_instead_of_their_factors():
    """Norm and sum both read a gradient that is formed, but only the gradient reads its factors."""
    stored = _stored(("a", "b"))
    assert not any(TOKENS in shape for shape in stored)
    assert (EXAMPLES, 4 * WIDTH) in stored


def test_stores_factors_of_large_gradients():
    assert any(TOKENS in shape for shape in _stored(("frozen",)))
