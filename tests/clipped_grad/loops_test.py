"""Tests that the same lines work in every loop: plain, TrainState, nnx, scan, injected rates."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx

import dpoptax
from tests import helpers

SIZE = 12
BATCH = helpers.mlp_batch(0, SIZE)
MASK = jnp.arange(SIZE) < 10


def _chain(learning_rate=0.5):
    return optax.chain(
        dpoptax.gaussian_noise(noise_multiplier=0.5, batch_size=10, key=jax.random.key(3)),
        dpoptax.extend.track_iterates([(1.5, -0.5), (1.0, 0.0)], weights=[0.75, 0.25]),
        dpoptax.doppler(b=[1 / 11, 1 / 11], a=[-9 / 11]),
        optax.adam(learning_rate),
    )


GRAD_FN = dpoptax.clipped_grad(
    helpers.mlp_loss, dpoptax.l2_clip(1.0), microbatch_size=4, method="vmap"
)


def _step(tx, params, state):
    grads = GRAD_FN(dpoptax.gradient_points(state, params), BATCH, MASK)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.fixture(scope="module")
def reference():
    """Returns the parameters after two steps of the plain loop, without compiling."""
    tx, params = _chain(), helpers.mlp_params(0)
    state = tx.init(params)
    for _ in range(2):
        params, state = _step(tx, params, state)
    assert dpoptax.ledgers(state)[0].releases == 2
    return params


def _close(params, reference):
    chex.assert_trees_all_close(params, reference, rtol=1e-4, atol=1e-5)


def _jitted(tx, params, state):
    step = jax.jit(lambda p, s: _step(tx, p, s), donate_argnums=(0, 1))
    for _ in range(2):
        params, state = step(params, state)
    assert step._cache_size() == 1
    return params, state


def _scanned(tx, *start):
    return jax.lax.scan(lambda carry, _: (_step(tx, *carry), None), start, length=2)[0]


@pytest.mark.parametrize(
    ("make", "loop"),
    [
        (_chain, _jitted),
        (_chain, _scanned),
        pytest.param(optax.inject_hyperparams(_chain), _jitted, marks=pytest.mark.slow),
    ],
    ids=["jit with donation", "scan", "injected learning rate"],
)
def test_loop_equals_plain_loop(make, loop, reference):
    tx, params = make(learning_rate=0.5), helpers.mlp_params(0)
    params, state = loop(tx, params, tx.init(params))
    _close(params, reference)
    assert dpoptax.ledgers(state)[0].releases == 2


def test_refuses_injected_noise_multiplier():
    noise = optax.inject_hyperparams(dpoptax.gaussian_noise, static_args=("batch_size", "key"))
    tx = noise(noise_multiplier=1.0, batch_size=10, key=jax.random.key(0))
    with pytest.raises(TypeError, match="noise_multiplier"):
        tx.init(helpers.mlp_params(0))


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (dpoptax.disk, {"kappa": 0.7, "gamma": 0.5}),
        (dpoptax.pmlf, {"length": 2, "beta": 0.5, "b": (1.0,)}),
        (dpoptax.contrib.inner_outer, {"length": 2, "beta": 0.5, "momentum": 0.9}),
        (dpoptax.adaptive_kalman, {"stddev": 0.1}),
        (dpoptax.lp_adam, {"learning_rate": 0.1, "b": (1.0,)}),
        (dpoptax.contrib.adam_bc, {"learning_rate": 0.1, "stddev": 0.1}),
    ],
)
def test_inject_hyperparams_error_names_static_args(factory, arguments):
    params = {"w": jnp.ones((3, 2))}
    with pytest.raises(TypeError, match="List all except the learning rate"):
        optax.inject_hyperparams(factory)(**arguments).init(params)
    numbers = set(inspect.signature(factory).parameters) - {"learning_rate"}
    tx = optax.inject_hyperparams(factory, static_args=numbers)(**arguments)
    state = tx.init(params)
    jax.jit(tx.update)(params, state, params)
    assert set(state.hyperparams) == {"learning_rate"} & set(arguments)


@pytest.mark.slow
def test_nnx_optimizer():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(5, 4, rngs=rngs)
            self.last = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.tanh(self.first(x)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, _chain(), wrt=nnx.Param)
    graph, before = nnx.split(model)

    def loss_fn(params, example):
        logits = nnx.merge(graph, params)(example[0])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, example[1])

    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))

    @nnx.jit
    def step(model, optimizer):
        # nnx.Optimizer.update would rebuild the gradients from their variables. A ClippedSum has
        # none, so the optimizer's transform is called on the pure states.
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        opt_state = nnx.as_pure(optimizer.opt_state)
        grads = grad_fn(dpoptax.gradient_points(opt_state, params), BATCH, MASK)
        updates, opt_state = optimizer.tx.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(optimizer.opt_state, nnx.state(opt_state))

    before = jax.tree.map(np.array, nnx.as_pure(before))
    for _ in range(3):
        step(model, optimizer)
    after = nnx.as_pure(nnx.state(model, nnx.Param))
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after, before)
    assert min(jax.tree.leaves(moved)) > 0
    assert dpoptax.ledgers(optimizer)[0].releases == 3

    sampler = dpoptax.sampling.PoissonSampler(100, 10, seed=0)
    spent = dpoptax.accounting.guarantee(nnx.as_pure(optimizer.opt_state), sampler).epsilon(1e-5)
    for state in (optimizer, optimizer.opt_state):
        assert dpoptax.accounting.guarantee(state, sampler).epsilon(1e-5) == spent
    grads = grad_fn(dpoptax.gradient_points((), after), BATCH, MASK)
    with pytest.raises(TypeError, match=r"nnx\.State.*optimizer\.tx\.update"):
        optimizer.update(model, grads)


@pytest.mark.parametrize("whole", [lambda model: model, lambda model: nnx.split(model)[1]])
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda rngs: nnx.BatchNorm(3, rngs=rngs), "BatchStat"),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "RngCount"),
    ],
)
def test_error_names_untrained_nnx_variables(layer, name, whole):
    params = whole(nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), layer(nnx.Rngs(0))))
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, dpoptax.l2_clip(1.0))
    with pytest.raises(TypeError, match=rf"is an nnx\.{name}\. .*nnx\.split\(model, nnx\.Param"):
        grad_fn(dpoptax.gradient_points((), params), BATCH, MASK)


@pytest.mark.parametrize(
    "layer",
    [lambda rngs: nnx.BatchNorm(3, rngs=rngs), lambda rngs: nnx.Dropout(0.5, rngs=rngs)],
    ids=["BatchNorm", "Dropout"],
)
def test_error_suggests_stateless_nnx_layer(layer):
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), layer(nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, x):
        return jnp.sum(nnx.merge(graph, params, rest)(x[None]))

    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    with pytest.raises(errors.TraceContextError) as raised:
        grad_fn(dpoptax.gradient_points((), params), jnp.ones((5, 4)))
    assert "nnx.GroupNorm" in raised.value.__notes__[0]
    for remedy in ("without rngs", "copy=True", "nnx.reseed(m, default=key)"):
        assert remedy in raised.value.__notes__[0]


def test_accepts_whole_nnx_model_with_only_params():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    grad_fn = dpoptax.clipped_grad(lambda m, x: jnp.sum(m(x) ** 2), dpoptax.l2_clip(1.0))
    clipped = grad_fn(dpoptax.gradient_points((), model), jnp.ones((5, 4)))
    assert isinstance(clipped.sum, nnx.Linear)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    "clip", [dpoptax.l2_clip(0.3), dpoptax.per_layer_clip(0.3)], ids=["l2", "per layer"]
)
def test_step_promotes_neither_ranks_nor_dtypes(clip, method):
    """Users who enable promotion errors see only promotions in their own code."""
    params = helpers.mlp_params(0)
    stage = {"noise_multiplier": 1.0, "batch_size": 12, "key": jax.random.key(0)}
    tx = optax.chain(dpoptax.gaussian_noise(**stage), dpoptax.disk(0.7, 0.5), optax.sgd(0.1))

    def loss(p, example):
        hidden = jnp.tanh(example[0] @ p[0]["w"] + p[0]["b"])
        return jnp.sum(jnp.square(hidden @ p[1]["w"] + p[1]["b"]))

    grad_fn = dpoptax.clipped_grad(loss, clip, method=method, microbatch_size=4)

    def step(params):
        state = tx.init(params)
        grads = grad_fn(dpoptax.gradient_points(state, params), BATCH, MASK)
        return tx.update(grads, state, params)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(step, params)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [(jax.nn.relu, "custom_jvp"), (lambda x: x, "function"), ("gelu", "str"), (object(), "object")],
)
def test_error_names_non_array_leaf_and_remedy(leaf, kind):
    """The error names the functions among the leaves of an Equinox module, not their addresses."""
    params = {"layers": [{"w": jnp.ones(3), "activation": leaf}]}
    noise = {"noise_multiplier": 1.0, "batch_size": 4, "key": jax.random.key(0)}
    strategy = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
    adaptive = dpoptax.contrib.adaptive_clip(1.0)
    loss_fn = lambda params, x: jnp.sum(params["layers"][0]["w"] * x)  # noqa: E731
    points = dpoptax.gradient_points((), params)
    for call in (
        lambda: dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))(points, jnp.ones((4, 3))),
        lambda: dpoptax.explain(loss_fn, params, jnp.ones(3)),
        lambda: optax.chain(dpoptax.gaussian_noise(**noise), optax.adam(0.1)).init(params),
        lambda: dpoptax.correlated_noise(strategy, **noise).init(params),
        lambda: dpoptax.contrib.adaptive_gaussian_noise(adaptive, **noise).init(params),
    ):
        match = rf"but \['layers'\]\[0\]\['activation'\] is an? {kind}\. .*eqx\.partition"
        with pytest.raises(TypeError, match=match):
            call()
