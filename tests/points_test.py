"""Gradient points: what `track_iterates` remembers and `gradient_points` makes of it."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax


def test_without_tracking_the_point_is_params():
    params = {"w": jnp.ones(3)}
    points = dpoptax.gradient_points(optax.adam(1.0).init(params), params)
    assert points.points == (params,)
    assert points.weights == (1.0,)
    assert points.tangent is None


def test_points_are_mixtures_of_the_iterates_whatever_the_optimizer_does():
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


def test_masked_parameters_stay_where_they_are():
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
def test_a_state_of_other_parameters_says_so(other):
    state = dpoptax.extend.track_iterates([(2.0, -1.0)], [1.0]).init(jnp.ones(2))
    with pytest.raises((TypeError, ValueError)) as caught:
        dpoptax.gradient_points(state, other)
    assert "earlier parameters of other shapes" in " ".join(caught.value.__notes__)


def test_two_trackers_are_refused_by_name():
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
        ({"rows": [], "weights": []}, "rows="),
        ({"rows": [(1.0,), (1.0, 2.0)], "weights": [1.0, 1.0]}, "rows="),
        ({"rows": [(1.0,)], "weights": [1.0, 1.0]}, "weights="),
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
def test_an_update_without_parameters_says_what_to_call(stage):
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"call tx.update\(grads, opt_state, params\)"):
        stage.update(params, stage.init(params))
