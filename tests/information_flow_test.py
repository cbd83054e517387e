"""What a step shows: every way around the noise is seen, and none is seen where none is."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpoptax
from dpoptax import information_flow, matrix, tables
from dpoptax.training.config import load_configs
from dpoptax.training.run import planning
from dpoptax.training.run.step import build_step

KEY = jax.random.key(0)
CLIP = dpoptax.l2_clip(1.0)
NOISE = {"noise_multiplier": 1.0, "batch_size": 4, "key": KEY}
PARAMS, BATCH, MASK = jnp.zeros(3), jnp.ones((8, 3)), jnp.ones(8, bool)
ADAPTIVE = dpoptax.adaptive_clip(0.1)
ENCODING = dpoptax.hyperspherical_clip(1.0, angle_norm=1.0)


def loss_fn(params, example):
    return jnp.sum((params - example) ** 2)


def flow_of(shows=None, *, noise=None, clip=CLIP, grads=None, behind=()):
    """Of a step that returns parameters, state and what `shows` makes of all it has."""
    noise = dpoptax.gaussian_noise(**NOISE) if noise is None else noise
    tx = optax.chain(noise, *behind, optax.adam(0.1))
    grad_fn = dpoptax.clipped_grad(loss_fn, clip)

    def step(params, opt_state, batch, mask):
        points = dpoptax.gradient_points(opt_state, params)
        clipped = (grads or grad_fn)(points, batch, mask)
        updates, opt_state = tx.update(clipped, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, shows and shows(params, opt_state, batch, mask, clipped)

    return information_flow(
        jax.jit(step), PARAMS, tx.init(PARAMS), BATCH, MASK, private_argnums=(2, 3)
    )


def paths(shown):
    return {each.path for each in shown}


STAGES = {
    "gaussian": (dpoptax.gaussian_noise(**NOISE), CLIP),
    "fixed point": (dpoptax.gaussian_noise(**NOISE, fixed_point=True), CLIP),
    "ChaCha20": (
        dpoptax.gaussian_noise(**{**NOISE, "key": dpoptax.random_key_from_os("chacha20")}),
        CLIP,
    ),
    "adaptive": (dpoptax.adaptive_gaussian_noise(ADAPTIVE, **NOISE), ADAPTIVE),
    "encoded": (dpoptax.gaussian_noise(**NOISE), ENCODING),
    "correlated": (dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE), CLIP),
    "correlated, fixed point": (
        dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE, fixed_point_clip=CLIP),
        CLIP,
    ),
    "drawn again": (
        dpoptax.correlated_noise(matrix.BandedInverseToeplitz((1.0, -0.5), steps=10), **NOISE),
        CLIP,
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_private_step_shows_releases_alone_and_its_state_keeps_the_key(stage):
    noise, clip = STAGES[stage]
    flow = flow_of(noise=noise, clip=clip)
    assert flow.private == ()
    kinds = {each.path: each.kind for each in flow.shown}
    assert kinds["[0]"] == "released"
    secret = {path.rpartition(".")[2].partition("[")[0] for path in paths(flow.secret)}
    assert secret == ({"key", "buffers"} if stage.startswith("correlated") else {"key"})


def test_what_a_method_keeps_is_made_of_releases():
    flow = flow_of(
        behind=(dpoptax.disk(kappa=0.7, gamma=0.5), dpoptax.doppler(b=(0.5,), a=(-0.5,)))
    )
    assert flow.private == ()
    assert {path.rpartition(".")[2] for path in paths(flow.secret)} == {"key"}


def losses(params, opt_state, batch, mask, clipped):
    return jnp.mean(jax.vmap(loss_fn, (None, 0))(params, batch))


def printed(params, opt_state, batch, mask, clipped):
    jax.debug.print("{}", mask.sum())


def printed_in_a_loop(params, opt_state, batch, mask, clipped):
    jax.lax.scan(lambda _, row: (None, printed(None, None, None, row > 0, None)), None, batch)


def on_the_host(params, opt_state, batch, mask, clipped):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return 0.0 * jax.pure_callback(lambda x: np.float32(x.sum()), shape, batch)


def chosen(params, opt_state, batch, mask, clipped):
    return jax.lax.cond(jnp.sum(batch) > 0, lambda: 1.0, lambda: 0.0)


def rounds(params, opt_state, batch, mask, clipped):
    return jax.lax.while_loop(lambda n: n < jnp.sum(mask), lambda n: n + 1, 0)


def a_round_later(params, opt_state, batch, mask, clipped):
    """What the first round writes the third shows."""

    def shift(carry, row):
        first, second = carry
        return (jnp.sum(row), first), second

    return jax.lax.scan(shift, (0.0, 0.0), batch)[1]


def by_reference(params, opt_state, batch, mask, clipped):
    ref = jax.new_ref(jnp.zeros(3))

    def add(i, _):
        ref[...] += batch[i]

    jax.lax.fori_loop(0, 8, add, None)
    return ref[...]


def by_reduction(params, opt_state, batch, mask, clipped):
    """The last number of a row: a reduction whose result is its second operand."""
    return jax.lax.reduce(batch, 0.0, lambda a, b: b, (0, 1))


def into_the_open(params, opt_state, batch, mask, clipped):
    OPEN[...] = batch.sum()


OPEN = jax.new_ref(0.0)


LEAKS = {
    losses: "[2]",
    printed: "debug_print",
    printed_in_a_loop: "debug_print",
    on_the_host: "pure_callback",
    chosen: "[2]",
    rounds: "[2]",
    a_round_later: "[2]",
    by_reference: "[2]",
    by_reduction: "[2]",
    into_the_open: "reference closed over",
    lambda *given: given[3].sum(): "[2]",
    lambda *given: given[4].sum: "[2]",
    lambda *given: optax.tree.norm(given[4].sum): "[2]",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_goes_around_the_noise_is_named(leak):
    flow = flow_of(leak)
    assert LEAKS[leak] in paths(flow.private)
    assert len(paths(flow.private)) == 1 + (leak is on_the_host)
    assert all(each.where for each in flow.private if leak is not into_the_open)


def test_the_table_names_the_line():
    """The user's own, where it is the user's own that computed it."""
    text = str(flow_of(losses))
    assert "private" in text.splitlines()[1]
    assert "information_flow_test.py" in text
    assert "secret" in text
    assert "released" in text


def test_what_a_release_makes_may_be_shown():
    flow = flow_of(lambda params, *_: optax.tree.norm(params))
    assert flow.private == ()


def test_a_number_drawn_with_the_noise_key_is_secret():
    flow = flow_of(lambda _, state, *__: jax.random.normal(state[0].key))
    assert "[2]" in paths(flow.secret)
    assert flow.private == ()


def centred(points, batch, mask):
    """A loss that looks at all examples through the mean that it closes over."""
    mean = batch.mean(0)
    loss = lambda params, example: loss_fn(params, example - mean)  # noqa: E731
    return dpoptax.clipped_grad(loss, CLIP)(points, batch, mask)


def looked_ahead(points, batch, mask):
    """A point that is moved by the data."""
    moved = dpoptax.gradient_points((), points.points[0] + batch.mean(0))
    return dpoptax.clipped_grad(loss_fn, CLIP)(moved, batch, mask)


@pytest.mark.parametrize("grads", [centred, looked_ahead])
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_noise_does_not_cover_what_no_clip_bounds(grads, method, monkeypatch):
    made = dpoptax.clipped_grad
    monkeypatch.setattr(dpoptax, "clipped_grad", lambda *args: made(*args, method=method))
    assert {"[0]", "[1][1][0].mu"} <= paths(flow_of(grads=grads).private)


def test_a_sum_that_somebody_vouches_for_is_taken_at_its_word():
    def vouched(points, batch, mask):
        return dpoptax.assert_clipped(batch.sum(0), CLIP, examples=len(batch))

    assert flow_of(grads=vouched).private == ()


def test_per_example_gradients_may_be_clipped_apart():
    def step(params, state, batch, mask):
        grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        return tx.update(grads, state, params, mask=mask)

    tx = dpoptax.clip_and_noise(CLIP, **NOISE)
    flow = information_flow(step, PARAMS, tx.init(PARAMS), BATCH, MASK, private_argnums=(2, 3))
    assert flow.private == ()


@pytest.mark.parametrize(
    "noise",
    [
        dpoptax.gaussian_noise(**{**NOISE, "noise_multiplier": 0.0}),
        dpoptax.geodp(0.1, **NOISE),
    ],
    ids=["no noise", "no proof"],
)
def test_a_stage_without_a_guarantee_releases_nothing(noise):
    assert "[0]" in paths(flow_of(noise=noise).private)


def test_selected_rows_are_a_release():
    selection = tables.RowSelection(table_size=50, threshold=8.0, capacity=20, rows_per_example=2)
    clip = tables.row_selecting_clip(CLIP, selection)
    tx = tables.row_selecting_noise(clip, **NOISE)
    params = {"table": jnp.zeros((50, 2)), "out": jnp.zeros(2)}

    def loss(params, example):
        rows, label = example
        return (jnp.tanh(tables.look_up(params["table"], rows).sum(0)) @ params["out"] - label) ** 2

    grad_fn = tables.selected_grad(loss, clip, where=lambda params: params["table"])

    def step(params, state, batch, mask):
        grads = grad_fn(state, params, batch, mask)
        return grads.rows, tx.update(grads.sum, state, grads.params)

    batch = (jnp.zeros((8, 2), jnp.int32), jnp.zeros(8))
    state = tx.init(params)
    flow = information_flow(step, params, state, batch, MASK, private_argnums=(2, 3))
    assert flow.private == ()


def test_a_whole_run_in_one_program_and_the_data_that_it_closes_over():
    tx = optax.chain(dpoptax.gaussian_noise(**NOISE), optax.sgd(0.1))
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP)
    data = jnp.ones((200, 3))

    def run(params, opt_state, rows, data):
        def step(state, rows):
            params, opt_state = state
            points = dpoptax.gradient_points(opt_state, params)
            updates, opt_state = tx.update(
                grad_fn(points, data[rows], rows >= 0), opt_state, params
            )
            return (optax.apply_updates(params, updates), opt_state), optax.tree.norm(updates)

        return jax.lax.scan(step, (params, opt_state), rows)

    args = PARAMS, tx.init(PARAMS), jnp.zeros((5, 8), jnp.int32)
    flow = information_flow(run, *args, data, private_argnums=3, secret_argnums=2)
    assert flow.private == ()
    closed = information_flow(lambda *args: run(*args, data), *args, private_argnums=2)
    assert any("[200,3]" in each for each in closed.closed_over)
    assert "[200,3]" in str(closed)


def test_a_step_of_nnx_is_followed_as_a_function_of_values():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))

    noise = dpoptax.correlated_noise(matrix.BandedToeplitz((1.0, 0.5)), **NOISE)
    model = Model()
    optimizer = nnx.Optimizer(model, optax.chain(noise, optax.sgd(0.1)), wrt=nnx.Param)
    graph, states = nnx.split((model, optimizer))
    grad_fn = dpoptax.clipped_grad(lambda params, x: loss_fn(params["w"], x), CLIP)

    def step(model, optimizer, batch, mask):
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        opt_state = nnx.as_pure(optimizer.opt_state)
        grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask)
        updates, opt_state = optimizer.tx.update(grads, opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(optimizer.opt_state, nnx.state(opt_state))

    def of_values(states, batch, mask):
        model, optimizer = nnx.merge(graph, states)
        step(model, optimizer, batch, mask)
        return nnx.as_pure(nnx.state((model, optimizer)))

    args = BATCH, MASK
    with pytest.raises(TypeError, match=r"flax.nnx Model.*nnx\.as_pure\(states\)"):
        information_flow(step, model, optimizer, *args, private_argnums=(2, 3))
    flow = information_flow(of_values, nnx.as_pure(states), *args, private_argnums=(1, 2))
    assert flow.private == ()
    assert len(flow.secret) == 2  # key and buffers
    assert {each.kind for each in flow.shown if "'w'" in each.path} == {"released", "secret"}


def test_an_argument_that_is_written_to_is_named():
    def write(ref, batch):
        ref[...] += batch.sum()

    flow = information_flow(write, jax.new_ref(0.0), BATCH, private_argnums=1)
    assert paths(flow.private) == {"reference among the arguments"}


def test_an_argument_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"private_argnums=\(2,\): 1 arguments"):
        information_flow(jnp.sum, PARAMS, private_argnums=(2,))


CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("digits/*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_step_of_the_trainer_shows_releases_alone(path):
    (config,) = load_configs(path).values()
    shapes = planning._shapes(config)
    plan = planning.make_plan(config, shapes.units)
    run = planning.resolve(config, plan, num_classes=shapes.num_classes, kind=shapes.kind)
    arguments = planning.step_arguments(run, shapes, resident=False)
    flow = information_flow(build_step(run.chain, run.model), *arguments, private_argnums=(2, 3))
    assert flow.private == () or not config.method.private
    assert config.method.private or "[0]" in {each.path[:3] for each in flow.private}
