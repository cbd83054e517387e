"""Tests of `low_pass` against scipy, of its memory, and of its three starts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal

import dpoptax
from tests.helpers import covering, slow_but


def _run(tx, xs, params=None):
    """Returns the outputs over the leading axis of `xs`, and the last state."""
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), xs) if params is None else params

    def body(state, x):
        out, state = tx.update(x, state)
        return state, out

    state, out = jax.lax.scan(body, tx.init(params), xs)
    return out, state


def _random_filter(rng, na, nb):
    """Returns a random stable filter of unit gain with poles of modulus below 0.95."""
    while True:
        pairs = [
            rng.uniform(0.1, 0.95) * np.exp(1j * rng.uniform(0, np.pi)) for _ in range(na // 2)
        ]
        poles = [*pairs, *np.conj(pairs), *rng.uniform(-0.95, 0.95, size=na % 2)]
        a = np.atleast_1d(np.real(np.poly(poles)))[1:]
        b = rng.normal(size=nb + 1)
        b *= (1 + np.sum(a)) / b.sum()
        if np.abs(b).max() < 10:
            return b, a


@pytest.mark.parametrize(("na", "nb"), covering(range(5), range(5), strength=1))
def test_matches_scipy(na, nb):
    rng = np.random.default_rng(10 * na + nb)
    b, a = _random_filter(rng, na, nb)
    xs = rng.normal(size=(60, 3)).astype(np.float32)
    out, state = _run(dpoptax.low_pass(b, a, start="zero"), jnp.asarray(xs))
    want = signal.lfilter(b, [1, *a], xs.astype(np.float64), axis=0)
    np.testing.assert_allclose(out, want, atol=2e-4 * np.abs(want).max())
    assert len(state.buffers) == max(na, nb)


QUICK_PRESETS = ("none", "doppler-second-order", "pmlf-cifar")


@pytest.mark.parametrize("name", slow_but(QUICK_PRESETS, dpoptax.filters.presets()))
def test_bias_correction_passes_constants(name):
    filt = dpoptax.filters.preset(name)
    xs = jnp.full((40, 2), 3.0)
    for tx in (dpoptax.doppler(*filt), dpoptax.low_pass(*filt, start="steady")):
        np.testing.assert_allclose(_run(tx, xs)[0], xs, rtol=2e-5)


@pytest.mark.parametrize("name", ["momentum", "doppler-second-order", "doppler-f5", "doppler-f6"])
def test_corrected_divides_by_response_to_ones(name):
    b, a = dpoptax.filters.preset(name)
    xs = np.random.default_rng(0).normal(size=(50, 2))
    want = signal.lfilter(b, [1, *a], xs, axis=0)
    want /= signal.lfilter(b, [1, *a], np.ones((50, 1)), axis=0)
    out, _ = _run(dpoptax.low_pass(b, a), jnp.asarray(xs, jnp.float32))
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "doppler-second-order", "doppler-f5"])
def test_steady_starts_as_if_first_input_were_constant(name):
    b, a = dpoptax.filters.preset(name)
    xs = np.random.default_rng(1).normal(size=(50, 1))
    initial = signal.lfilter_zi(b, [1, *a])[:, None] * xs[:1]
    want, _ = signal.lfilter(b, [1, *a], xs, axis=0, zi=initial)
    out, _ = _run(dpoptax.low_pass(b, a, start="steady"), jnp.asarray(xs, jnp.float32))
    np.testing.assert_allclose(out, want, atol=2e-5)


def test_keeps_dtypes_and_allows_wider_buffers():
    params = {"w": jnp.zeros(2, jnp.bfloat16)}
    xs = {"w": jnp.ones((300, 2), jnp.bfloat16)}
    out, state = _run(dpoptax.low_pass([0.01], [-0.99], accumulator_dtype=jnp.float32), xs, params)
    assert out["w"].dtype == jnp.bfloat16
    assert state.buffers[0]["w"].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out["w"], np.float32), 1.0, rtol=1e-2)
    _, state = _run(dpoptax.low_pass([0.01], [-0.99]), xs, params)
    assert state.buffers[0]["w"].dtype == jnp.bfloat16


def test_order_zero_is_identity_and_empty_trees_pass():
    tx = dpoptax.low_pass([1.0])
    x = {"a": jnp.arange(3.0), "none": None}
    out, state = tx.update(x, tx.init(x))
    chex.assert_trees_all_equal(out, x)
    assert state.buffers == ()
    tx = dpoptax.doppler([0.1], [-0.9])
    assert tx.update({}, tx.init({}))[0] == {}


def test_refuses_bad_filters_and_starts():
    with pytest.raises(ValueError, match="pole"):
        dpoptax.low_pass([0.1], [-1.1])
    with pytest.raises(ValueError, match="`start` must .* got 'warm'"):
        dpoptax.low_pass([1.0], start="warm")
