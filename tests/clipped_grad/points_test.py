"""Tests gradient points: `track_iterates` remembers iterates, `gradient_points` reads them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax


def test_gradient_points_default_to_params():
    params = {"w": jnp.ones(3)}
    points = dpoptax.gradient_points(optax.adam(1.0).init(params), params)
    assert points.points == (params,)
    assert points.weights == (1.0,)
    assert points.tangent is None


def test_points_mix_iterates_for_any_optimizer():
    rows = [(1.5, -0.25, -0.25), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)]
    tx = optax.chain(
        dpoptax.extend.track_iterates(rows, weights=[2.0, -1.5, 0.5]),
        optax.adamw(optax.linear_schedule(0.5, 0.1, 5), weight_decay=0.1),
    )
    params = jnp.array([1.0, -2.0])
    state = tx.init(params)
    history = [params, params, params]
    for t in range(6):
        points = dpoptax.gradient_points(state, params)
        for row, point in zip(rows, points.points, strict=True):
            want = sum(c * x for c, x in zip(row, history, strict=True))
            np.testing.assert_allclose(point, want, rtol=1e-6)
        np.testing.assert_allclose(points.weights, [2.0, -1.5, 0.5])
        updates, state = tx.update(jnp.sin(params + t), state, params)
        params = optax.apply_updates(params, updates)
        history = [params, *history[:2]]


def test_scheduled_weights_and_tangent():
    tx = dpoptax.extend.track_iterates(
        [(1.0, 0.0)],
        weights=lambda t: [1.0 + t],
        tangent_row=(1.0, -1.0),
        tangent_weight=lambda t: 3.0 * t,
    )
    x0, x1 = jnp.array([1.0]), jnp.array([5.0])
    state = tx.init(x0)
    points = dpoptax.gradient_points(state, x0)
    assert points.weights[0] == 1.0
    assert points.tangent == 0.0
    _, state = tx.update(x0, state, x0)
    points = dpoptax.gradient_points(state, x1)
    assert points.weights[0] == 2.0
    assert points.tangent == 3.0 * (5.0 - 1.0)


def test_masked_parameters_are_unchanged():
    tx = optax.masked(
        dpoptax.extend.track_iterates([(2.0, -1.0)], [1.0]), {"train": True, "frozen": False}
    )
    params = {"train": jnp.ones(2), "frozen": {"a": jnp.ones(3)}}
    state = tx.init(params)
    moved = {"train": jnp.full(2, 3.0), "frozen": {"a": jnp.ones(3)}}
    _, state = tx.update(params, state, params)
    (point,) = dpoptax.gradient_points(state, moved).points
    chex.assert_trees_all_close(point, {"train": jnp.full(2, 5.0), "frozen": {"a": jnp.ones(3)}})


@pytest.mark.parametrize("other", [{"params": jnp.ones(2)}, jnp.ones(3)])
def test_refuses_state_of_other_parameters(other):
    state = dpoptax.extend.track_iterates([(2.0, -1.0)], [1.0]).init(jnp.ones(2))
    with pytest.raises((TypeError, ValueError)) as caught:
        dpoptax.gradient_points(state, other)
    assert "must have the structure of `params`" in " ".join(caught.value.__notes__)


def test_refuses_two_trackers_by_name():
    tx = optax.chain(
        dpoptax.extend.track_iterates([(1.0,)], [1.0]),
        dpoptax.extend.track_iterates([(1.0,)], [1.0]),
    )
    params = jnp.ones(2)
    with pytest.raises(ValueError, match=r"opt_state\[0\], opt_state\[1\]"):
        dpoptax.gradient_points(tx.init(params), params)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rows": [], "weights": []}, "`rows` must"),
        ({"rows": [(1.0,), (1.0, 2.0)], "weights": [1.0, 1.0]}, "`rows` must"),
        ({"rows": [(1.0,)], "weights": [1.0, 1.0]}, "`weights` must"),
        ({"rows": [(1.0,)], "weights": [1.0], "tangent_row": (1.0,)}, "tangent_weight=None"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.extend.track_iterates(**kwargs)


@pytest.mark.parametrize(
    "stage",
    [
        dpoptax.disk(kappa=0.7, gamma=0.5),
        dpoptax.pmlf(2, 0.1, [1.0]),
        dpoptax.extend.track_iterates([(1.0, 0.0)], [1.0]),
    ],
    ids=["disk", "pmlf", "track_iterates"],
)
def test_update_without_params_names_the_call(stage):
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"Call `tx.update\(grads, opt_state, params\)`"):
        stage.update(params, stage.init(params))


def _step(method, noise, grads_of):
    """Returns a step through a chain; jit flattens its optimizer state, as in training loops."""
    tx = optax.chain(noise, method, optax.sgd(0.1))
    params = jnp.ones(3)

    def step(state, batch):
        return tx.update(grads_of(state, params, batch), state, params)

    return step, tx.init(params), jnp.ones((4, 3))


def _gaussian():
    return dpoptax.gaussian_noise(noise_multiplier=0.1, batch_size=4, key=jax.random.key(0))


GRAD_FN = dpoptax.clipped_grad(lambda w, x: jnp.sum((w - x) ** 2), 1.0, method="vmap")
WITH_POINTS = {
    "disk": dpoptax.disk,
    "disk of one gradient": lambda: dpoptax.disk(gamma=None),
    "disk of a product": lambda: dpoptax.disk(gamma=0.0),
    "disk on a schedule": lambda: dpoptax.disk(lambda t: 0.7),
    "pmlf": dpoptax.pmlf,
    "dp_sat": dpoptax.contrib.dp_sat,
    "inner_outer": lambda: dpoptax.contrib.inner_outer(2, 0.5, 0.9),
    "linear_map": lambda: dpoptax.extend.linear_map(2.0),
    "track_reference": dpoptax.extend.track_reference,
}
AT_PARAMETERS = {
    "disk": lambda: dpoptax.disk(kappa=1.0),
    "pmlf": lambda: dpoptax.pmlf(length=1),
    "doppler": dpoptax.doppler,
}


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", WITH_POINTS)
def test_method_accepts_gradients_at_its_points(name, traced):
    wrap = lambda f: functools.partial(jax.eval_shape, f) if traced else f  # noqa: E731
    at_points = lambda state, params, batch: GRAD_FN(  # noqa: E731
        dpoptax.gradient_points(state, params), batch
    )
    step, state, batch = _step(WITH_POINTS[name](), _gaussian(), at_points)
    wrap(step)(state, batch)


@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WITH_POINTS)
def test_method_refuses_gradients_at_other_points(name, traced):
    wrap = lambda f: functools.partial(jax.eval_shape, f) if traced else f  # noqa: E731
    make = WITH_POINTS[name]
    for elsewhere in (
        lambda state, params, batch: GRAD_FN(params, batch),
        lambda state, params, batch: GRAD_FN(dpoptax.gradient_points((), params), batch),
    ):
        step, state, batch = _step(make(), _gaussian(), elsewhere)
        with pytest.raises(ValueError, match="must be taken at this method's points"):
            wrap(step)(state, batch)
    noise = dpoptax.clip_and_noise(1.0, noise_multiplier=0.1, batch_size=4, key=jax.random.key(0))
    step, state, batch = _step(make(), noise, lambda state, params, batch: batch)
    with pytest.raises(ValueError, match="must be taken at this method's points"):
        wrap(step)(state, batch)


def test_method_refuses_points_of_another_method():
    tx = optax.chain(_gaussian(), dpoptax.disk())
    params = jnp.ones(3)
    other = dpoptax.pmlf().init(params)
    with pytest.raises(ValueError, match="must be taken at this method's points"):
        tx.update(
            GRAD_FN(dpoptax.gradient_points(other, params), jnp.ones((4, 3))),
            tx.init(params),
            params,
        )


@pytest.mark.parametrize("name", AT_PARAMETERS)
def test_method_without_points_accepts_gradients_at_params(name):
    make = AT_PARAMETERS[name]
    step, state, batch = _step(make(), _gaussian(), lambda _, params, batch: GRAD_FN(params, batch))
    step(state, batch)


def test_hand_made_points_are_not_checked():
    by_hand = lambda state, params, batch: GRAD_FN(  # noqa: E731
        dpoptax.GradientPoints((params,), (1.0,)), batch
    )
    step, state, batch = _step(dpoptax.disk(), _gaussian(), by_hand)
    step(state, batch)


def test_accumulate_refuses_parts_at_different_points():
    params, batch = jnp.ones(3), jnp.ones((4, 3))
    state = dpoptax.disk().init(params)
    parts = GRAD_FN(params, batch), GRAD_FN(dpoptax.gradient_points(state, params), batch)
    with pytest.raises(ValueError, match="points of different methods"):
        dpoptax.accumulate(*parts)
