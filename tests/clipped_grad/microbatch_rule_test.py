"""Tests of the number of examples that a device computes at once by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._losses.microbatch_rule import microbatch_rule
from dpoptax._losses.trace_loss import trace_loss

D = 4000
SQUARE = jax.ShapeDtypeStruct((D, D), np.float32)  # 64 MB
SMALL = jax.ShapeDtypeStruct((1000, 1000), np.float32)  # 4 MB


def size(loss, params, example, rows=2**20, platform="cpu"):
    return microbatch_rule(trace_loss(loss, params, example, None, has_aux=False), rows, platform)


def row(length):
    return jax.ShapeDtypeStruct((length,), np.float32)


def layer(w, x):
    return jnp.sum(jnp.tanh(x @ w))  # 4 D bytes


def outer(w, x):
    return jnp.sum(jnp.tanh(x[:, None] @ w[None]))


def scanned(step, length):
    return lambda w, x: jnp.sum(jax.lax.scan(lambda h, _: (step(w, h), None), x, length=length)[0])


outer_scan = scanned(lambda w, h: jnp.tanh(h[:, None] @ w[None])[:, 0], 8)
FROZEN = np.ones(SMALL.shape, np.float32)
CASES = {
    "7 MB for small parameters": (outer, row(1), 5000, 2**9),
    "0.4 times the bytes of large parameters": (layer, SQUARE, D, 2**11),
    "results in a scan count in each step": (outer_scan, row(1), 5000, 2**6),
    "so do parameters": (scanned(lambda w, h: jnp.tanh(h @ w), 16), SMALL, 1000, 2**9),
    "so do constants": (scanned(lambda w, h: jnp.tanh(w * h @ FROZEN), 16), row(1), 1000, 2**9),
    "without products, all examples": (lambda w, x: jnp.sum(w * x), row(1), 5000, 2**20),
}


@pytest.mark.parametrize("name", CASES)
def test_default_size(name):
    loss, params, length, expected = CASES[name]
    assert size(loss, params, row(length)) == expected


def test_no_more_than_the_rows_and_all_elsewhere():
    assert size(layer, SQUARE, row(D), rows=100) == 100
    assert size(outer, row(1), row(5000), rows=350) == 350  # 7 MB, without a second trace
    assert size(outer, row(1), row(5000), rows=513) == 512
    assert size(layer, SQUARE, row(D), platform="gpu") == 2**20


def test_clipped_grad_takes_the_size_that_explain_names():
    w, batch = jnp.full(1, 0.5), jnp.ones((70, 2**16))
    found = dpoptax.explain(outer_scan, w, batch[0], batch_size=70)
    assert found.microbatch_size == 4
    assert "4 of 70 examples are computed at once" in str(found)

    def program(microbatch_size):
        return str(
            jax.make_jaxpr(dpoptax.clipped_grad(outer_scan, 1.0, microbatch_size=microbatch_size))(
                w, batch
            )
        )

    assert program(None) == program(4)
    assert program(None) != program(70)
    assert program(70) == program(1000)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_default_differs_from_the_whole_batch_by_rounding(method):
    batch = jax.random.normal(jax.random.key(0), (50, 2**18))
    default, whole = (
        dpoptax.clipped_grad(outer, 1.0, method=method, microbatch_size=size)(
            jnp.ones(1), batch
        ).sum
        for size in (None, 50)
    )
    np.testing.assert_allclose(default, whole, rtol=1e-5)
