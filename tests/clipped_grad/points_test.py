"""Tests gradient points: `track_iterates` remembers iterates, `gradient_points` reads them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._points.points import ReferenceState, points_code, track_iterates


def test_gradient_points_default_to_params():
    params = {"w": jnp.ones(3)}
    points = dpoptax.gradient_points(optax.adam(1.0).init(params), params)
    assert points.points == (params,)
    assert points.weights == (1.0,)


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


def test_refuses_weights_that_are_arrays():
    with pytest.raises(TypeError, match="`weights` must be Python floats"):
        dpoptax.GradientPoints((jnp.ones(3),), (jnp.float32(1.0),))


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


def _gaussian(key=0):
    return dpoptax.gaussian_noise(noise_multiplier=0.1, batch_size=4, key=jax.random.key(key))


def _step(tx, grads_of, traced=False):
    """Makes a step from parameters of ones, and returns the optimizer's next state."""
    params, batch = jnp.ones(3), jnp.ones((4, 3))

    def step(state):
        return tx.update(grads_of(state, params, batch), state, params)[1]

    return (functools.partial(jax.eval_shape, step) if traced else step)(tx.init(params))


GRAD_FN = dpoptax.clipped_grad(lambda w, x: jnp.sum((w - x) ** 2), 1.0, method="vmap")
WITH_POINTS = {
    "disk": dpoptax.disk,
    "disk of one gradient": lambda: dpoptax.disk(gamma=None),
    "pmlf": dpoptax.pmlf,
    "inner_outer": lambda: dpoptax.contrib.inner_outer(2, 0.5, 0.9),
}
AT_PARAMETERS = {
    "disk": lambda: dpoptax.disk(kappa=1.0),
    "pmlf": lambda: dpoptax.pmlf(length=1),
    "doppler": dpoptax.doppler,
}
# Transforms between the noise stage and the method.
BETWEEN = {
    "nothing": optax.identity,
    "scale": lambda: optax.scale(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "doppler": dpoptax.doppler,
}
ELSEWHERE = {
    "params": lambda state, params, batch: GRAD_FN(params, batch),
    "points of another state": lambda state, params, batch: GRAD_FN(
        dpoptax.gradient_points((), params), batch
    ),
}


def _at_points(state, params, batch):
    return GRAD_FN(dpoptax.gradient_points(state, params), batch)


def _refuses():
    return pytest.raises(ValueError, match="must be taken at this method's points")


def _warns():
    return pytest.warns(UserWarning, match="were not taken at the points of opt_state")


@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WITH_POINTS)
def test_chain_accepts_gradients_at_the_methods_points(name, traced):
    _step(
        dpoptax.extend.chain(_gaussian(), WITH_POINTS[name](), optax.sgd(0.1)), _at_points, traced
    )


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", WITH_POINTS)
def test_chain_refuses_gradients_at_other_points(name, between, elsewhere):
    stages = _gaussian(), BETWEEN[between](), WITH_POINTS[name](), optax.sgd(0.1)
    with _refuses():
        _step(dpoptax.extend.chain(*stages), ELSEWHERE[elsewhere], traced=True)


@pytest.mark.parametrize("name", WITH_POINTS)
def test_chain_refuses_gradients_that_it_clips(name):
    noise = dpoptax.clip_and_noise(1.0, noise_multiplier=0.1, batch_size=4, key=jax.random.key(0))
    with _refuses():
        _step(
            dpoptax.extend.chain(noise, WITH_POINTS[name]()),
            lambda state, params, batch: batch,
            True,
        )


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", ["disk", "pmlf"])
def test_ledger_warns_of_gradients_at_other_points(name, between):
    tx = optax.chain(_gaussian(), BETWEEN[between](), WITH_POINTS[name](), optax.sgd(0.1))
    state = jax.jit(lambda: _step(tx, ELSEWHERE["params"]))()
    with _warns():
        (ledger,) = dpoptax.ledgers(state)
    assert ledger.releases == 1


@pytest.mark.parametrize("name", WITH_POINTS)
def test_ledger_accepts_gradients_at_the_methods_points(name):
    tx = optax.chain(_gaussian(), optax.scale(1.0), WITH_POINTS[name](), optax.sgd(0.1))
    dpoptax.ledgers(tx.init(jnp.ones(3)))  # before any release
    (ledger,) = dpoptax.ledgers(jax.jit(lambda: _step(tx, _at_points))())
    assert ledger.releases == 1


def test_check_sees_methods_under_wrappers():
    disk = dpoptax.disk()
    for wrapped in (
        optax.masked(disk, True),
        optax.multi_transform({"a": disk, "b": optax.sgd(0.1)}, "a"),
        optax.apply_if_finite(disk, 3),
    ):
        _step(dpoptax.extend.chain(_gaussian(), wrapped), _at_points, traced=True)
        with _refuses():
            _step(dpoptax.extend.chain(_gaussian(), wrapped), ELSEWHERE["params"], traced=True)
        with _warns():
            dpoptax.ledgers(_step(optax.chain(_gaussian(), wrapped), ELSEWHERE["params"]))


def test_check_follows_a_loop():
    tx = dpoptax.extend.chain(_gaussian(), optax.scale(1.0), dpoptax.disk(), optax.sgd(0.1))
    params, batch = jnp.ones(3), jnp.ones((4, 3))

    def run(grads_of):
        step = lambda state, _: (tx.update(grads_of(state, params, batch), state, params)[1], None)  # noqa: E731
        return jax.jit(lambda state: jax.lax.scan(step, state, length=3)[0])(tx.init(params))

    assert dpoptax.ledgers(run(_at_points))[0].releases == 3
    with _refuses():
        run(ELSEWHERE["params"])


def test_each_chain_of_a_pair_is_checked_by_its_own_noise():
    chains = [optax.chain(_gaussian(key), dpoptax.disk()) for key in range(2)]
    right = _step(chains[0], _at_points)
    public = optax.adam(0.1).init(jnp.ones(3))
    dpoptax.ledgers({"discriminator": right, "generator": public})
    dpoptax.ledgers({"discriminator": right, "generator": _step(chains[1], _at_points)})
    wrong = _step(chains[1], ELSEWHERE["params"])
    with pytest.warns(UserWarning, match=r"points of opt_state\['generator'\]\[1\]\[0\]\. The"):
        dpoptax.ledgers({"discriminator": right, "generator": wrong})


def test_chain_refuses_points_of_another_method():
    other = dpoptax.pmlf().init(jnp.ones(3))
    with _refuses():
        _step(
            dpoptax.extend.chain(_gaussian(), dpoptax.disk()),
            lambda state, params, batch: _at_points(other, params, batch),
        )


@pytest.mark.parametrize("name", AT_PARAMETERS)
def test_method_without_points_accepts_gradients_at_params(name):
    tx = dpoptax.extend.chain(_gaussian(), AT_PARAMETERS[name]())
    dpoptax.ledgers(_step(tx, ELSEWHERE["params"]))


def test_hand_made_points_are_not_checked():
    by_hand = lambda state, params, batch: GRAD_FN(  # noqa: E731
        dpoptax.GradientPoints((params,), (1.0,)), batch
    )
    dpoptax.ledgers(_step(dpoptax.extend.chain(_gaussian(), dpoptax.disk()), by_hand))


def test_code_of_points_is_part_of_checkpoints():
    """Another code would warn in runs that a later version continues."""

    def code(*row, followed=None):
        return points_code(track_iterates([row], [1.0]).init(jnp.ones(1)), followed)

    followed = ReferenceState(jnp.ones(1))
    assert points_code(None, None) == 4246120509
    assert code(1.5, -0.5, followed=followed) == 976113047
    assert code(-0.0, 1.0) == code(0.0, 1.0)


def test_accumulate_refuses_parts_at_different_points():
    params, batch = jnp.ones(3), jnp.ones((4, 3))
    state = dpoptax.disk().init(params)
    parts = GRAD_FN(params, batch), GRAD_FN(dpoptax.gradient_points(state, params), batch)
    with pytest.raises(ValueError, match="points of different methods"):
        dpoptax.accumulate(*parts)
