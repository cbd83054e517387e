"""Tests that losses which would mix mapped examples are refused, and others accepted."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import dpoptax

CLIP = dpoptax.l2_clip(1.0)
POINTS = dpoptax.gradient_points((), jnp.zeros(3))
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


@jax.custom_batching.custom_vmap
def _centered(x):
    return x


@_centered.def_vmap
def _(size, batched, x):
    del size, batched
    return x - jnp.mean(x, axis=0), True


def _outside(x, method):
    found = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda y: y, found, jax.lax.stop_gradient(x), vmap_method=method)


def _effect(x):
    return io_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _kept(x):
    last = _KEPT[...]
    _KEPT[...] = jax.lax.stop_gradient(x)
    return x - last


_KEPT = jax.new_ref(jnp.zeros(3))


def _in_a_scan(x):
    return jax.lax.scan(lambda total, row: (total + _centered(row), None), x, x[None])[0]


def _ruled(mix, at):
    """Computes w @ x with a derivative in which `mix` changes x across the batch."""
    product = jax.custom_vjp(lambda w, x: w @ x)
    forward = lambda w, x: (w @ x, mix(x) if at == "forward" else x)  # noqa: E731
    backward = lambda x, g: (g * (mix(x) if at == "backward" else x), jnp.zeros_like(x))  # noqa: E731
    product.defvjp(forward, backward)
    return product


def _ruled_forward(mix):
    product = jax.custom_jvp(lambda w, x: w @ x)
    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] @ mix(primals[1])))
    return product


def _of_parameters(mix):
    """Returns w, with cotangents that mix although no operand is an example."""
    same = jax.custom_vjp(lambda w: w)
    same.defvjp(lambda w: (w, None), lambda _, g: (mix(g),))
    return same


def _twice(mix):
    """Computes w @ x with an exact gradient whose derivative mixes examples."""
    inner = _ruled_forward(mix)
    product = jax.custom_vjp(lambda w, x: w @ x)
    product.defvjp(
        lambda w, x: (w @ x, (w, x)),
        lambda given, g: (g * given[1] * (1 + inner(*given)), jnp.zeros_like(given[1])),
    )
    return product


def _twice_forward(mix):
    """The same by a derivative of tangents."""
    inner = _ruled_forward(mix)
    product = jax.custom_jvp(lambda w, x: w @ x)
    product.defjvp(lambda at, along: (product(*at), along[0] @ at[1] * (1 + inner(*at))))
    return product


def _mean(x):
    return jax.lax.pmean(x, "runs")


def _with_option(loss):
    """Traces a loss with an option under which programs do not show the rules of custom_vjp."""

    def traced(w, x):
        jax.config.update("jax_custom_vjp3", True)
        try:
            return loss(w, x)
        finally:
            jax.config.update("jax_custom_vjp3", False)

    return traced


MIXING = {
    "a vmap rule": (lambda w, x: w @ _centered(x), "its own vmap rule"),
    "a rule that keeps examples separate": (
        lambda w, x: w @ jax.custom_batching.sequential_vmap(jnp.sin)(x),
        "may combine .* `sequential_vmap` does, call the function without it",
    ),
    "a vmap rule in a scan": (lambda w, x: w @ _in_a_scan(x), "its own vmap rule"),
    "a callback": (lambda w, x: w @ _outside(x, "broadcast_all"), "whole batch"),
    "an effect": (lambda w, x: w @ _effect(x), "whole batch"),
    "a reference": (lambda w, x: w @ _kept(x), "`jax.Ref` from outside"),
    "a collective": (lambda w, x: w @ (x - jax.lax.pmean(x, "runs")), "over the axis 'runs'"),
    "a rule's pass forward": (_ruled(_centered, "forward"), "its own vmap rule"),
    "a rule's pass backward": (_ruled(_centered, "backward"), "its own vmap rule"),
    "a callback in a rule": (
        _ruled(lambda x: _outside(x, "broadcast_all"), "backward"),
        "whole batch",
    ),
    "a collective in a rule": (_ruled(_mean, "backward"), "over the axis 'runs'"),
    "a rule of tangents": (_ruled_forward(_centered), "its own vmap rule"),
    "a rule in a scan": (
        lambda w, x: jax.lax.scan(
            lambda total, row: (total + _ruled(_centered, "backward")(w, row), None), 0.0, x[None]
        )[0],
        "its own vmap rule",
    ),
    "a rule of parameters alone": (
        lambda w, x: _of_parameters(_centered)(w) @ x,
        "its own vmap rule",
    ),
    "a rule that an option hides": (
        _with_option(lambda w, x: _ruled(_centered, "backward")(w, x)),
        "hijax, got CustomVJPTraced",
    ),
    "such a rule of parameters alone": (
        _with_option(lambda w, x: _of_parameters(_centered)(w) @ x),
        "hijax, got CustomVJPTraced",
    ),
    "a place": (lambda w, x: w @ x * jax.lax.axis_index("runs"), "over the axis 'runs'"),
}


def _moved(method, loss, **random):
    """Returns the sum inside an axis "runs", as in `vmap` and `shard_map`."""
    grad_fn = dpoptax.clipped_grad(loss, CLIP, method=method)
    sums = lambda batch: grad_fn(POINTS, batch, **random).sum  # noqa: E731
    return jax.vmap(sums, axis_name="runs")(BATCH[None])[0]


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("name", MIXING)
def test_refuses_losses_that_may_mix_examples(name, method):
    loss, message = MIXING[name]
    with pytest.raises(TypeError, match=message):
        _moved(method, loss)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_derivative_rule_counts_only_where_it_is_taken(method):
    """A gradient does not reach the rule of a second derivative, but one of a gradient does."""
    loss, forward = _twice(_centered), _twice_forward(_centered)
    dpoptax.clipped_grad(loss, CLIP, method=method)(POINTS, BATCH)
    dpoptax.clipped_grad(forward, CLIP, method=method)(POINTS, BATCH)
    steep = lambda w, x: jax.jvp(lambda w: forward(w, x), (w,), (w,))[1]  # noqa: E731
    with pytest.raises(TypeError, match="with its own vmap rule"):
        dpoptax.clipped_grad(steep, CLIP, method=method)(POINTS, BATCH)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_unreached_derivative_rules_are_not_called(method):
    of_data = jax.custom_vjp(lambda x: x)
    of_data.defvjp(lambda x: (x, None), lambda _, g: 1 / 0)
    loss = lambda w, x: w @ of_data(x) + of_data(jax.lax.stop_gradient(w)) @ x  # noqa: E731
    grad_fn = dpoptax.clipped_grad(loss, CLIP, method=method)
    plain = dpoptax.clipped_grad(lambda w, x: w @ x, CLIP, method=method)
    np.testing.assert_allclose(grad_fn(POINTS, BATCH).sum, plain(POINTS, BATCH).sum, rtol=1e-6)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_refuses_random_numbers_that_depend_on_position(impl, method):
    loss = lambda w, x, key: w @ (x * jax.random.normal(key, (3,)))  # noqa: E731
    random = {"key": jax.random.key(0, impl=impl), "ids": jnp.arange(4)}
    with pytest.raises(TypeError, match="generator 'rbg'.*threefry2x32"):
        _moved(method, loss, **random)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_accepts_shared_values_and_sequential_callbacks(method):
    mask = lambda: jax.random.bernoulli(jax.random.key(1, impl="rbg"), shape=(3,))  # noqa: E731

    def loss(w, x):
        jax.debug.callback(lambda y: None, x)
        same = _centered(jnp.ones(3))
        return (w * same) @ jnp.where(mask(), _outside(x, "sequential"), x)

    plain = lambda w, x: w @ x  # noqa: E731
    np.testing.assert_allclose(_moved(method, loss), _moved(method, plain), rtol=1e-6)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_refuses_series_that_wait_for_last_example(method):
    """Such a series is refused: before JAX 0.12 one example changed others by a relative 3e-5."""

    def loss(w, x):
        a, b, y = x
        return -jnp.log(jax.scipy.special.betainc(a, b, jax.nn.sigmoid(y + w @ jnp.ones(3))))

    def added(first):
        rows = np.array([[1.729, 0.1638, 0.9928]] * 64, np.float32)
        rows[0] = first
        return dpoptax.clipped_grad(loss, CLIP, method=method)(POINTS, rows, np.arange(64) > 0).sum

    if jax.__version_info__ < (0, 12):
        with pytest.raises(TypeError, match="until the last one has converged"):
            added((1.0, 1.0, 0.0))
    else:
        np.testing.assert_array_equal(added((1.0, 1.0, 0.0)), added((1e6, 1e6, 0.0)))


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_accepts_operations_that_jax_hides_itself(method):
    places = jnp.arange(3.0)
    loss = lambda w, x: w @ x * w[jnp.searchsorted(places, x[0])]  # noqa: E731
    found = dpoptax.clipped_grad(loss, CLIP, method=method)(POINTS, BATCH)
    assert np.all(np.isfinite(found.sum))


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_refuses_eigenvalues_on_tpu(method, monkeypatch):
    """TPUs rotate all matrices of a batch until the last one is diagonal."""

    def loss(w, x):
        square = jnp.outer(w * x, w * x) + jnp.diag(w)
        return jnp.sum(jnp.linalg.eigvalsh(square)) + jnp.sum(jnp.linalg.svd(square)[1])

    grad_fn = dpoptax.clipped_grad(loss, CLIP, method=method)
    points = dpoptax.gradient_points((), jnp.arange(1.0, 4.0))
    assert np.all(np.isfinite(grad_fn(points, BATCH).sum))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(TypeError, match="compute eigh.*until the last one has converged"):
        dpoptax.clipped_grad(loss, CLIP, method=method)(points, BATCH)


def _checked(on_error, inside):
    """Returns a loss that checks its example, in the loss itself or in a scan."""

    def check(x):
        return eqx.error_if(x, jnp.any(x > 100), "too large", on_error=on_error)

    def scanned(x):
        return jax.lax.scan(lambda c, _: (check(jnp.tanh(c)), None), x, None, length=2)[0]

    return lambda w, x: jnp.sum(jnp.tanh((scanned if inside else check)(x * w)) ** 2)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "nan"])
def test_refuses_errors_that_depend_on_an_example(on_error, inside, method):
    """With "nan", one invalid example would take all others out of the sum."""
    grad_fn = dpoptax.clipped_grad(_checked(on_error, inside), CLIP, method=method)
    with pytest.raises(TypeError, match="throw=False.*EQX_ON_ERROR=off"):
        jax.eval_shape(grad_fn, jnp.ones(3), BATCH)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("inside", [False, True])
def test_accepts_errors_that_are_off(inside, method):
    loss = _checked("off", inside)
    batch = BATCH.at[1].set(1e3)
    found = dpoptax.clipped_grad(loss, CLIP, method=method)(jnp.ones(3), batch).sum
    plain = jax.vmap(jax.grad(loss), (None, 0))(jnp.ones(3), batch)
    want = sum(g / max(1.0, np.linalg.norm(g)) for g in np.asarray(plain))
    np.testing.assert_allclose(found, want, rtol=0.02, atol=1e-3)
