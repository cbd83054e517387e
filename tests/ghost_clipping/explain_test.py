"""Tests that `explain` describes each network and reports every per-example gradient."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import pytest

import dpoptax
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import ghost_clipped_sum
from tests.helpers import equations, sum_by
from tests.networks import NETWORKS

pytestmark = pytest.mark.slow  # a description and memory, which no guarantee needs

# The parameters that need per-example gradients because no rule covers their uses.
FALLBACKS = {
    "lstm": {"h": "meets data in the carry of scan"},
    "nested_scans": {"h": "meets data in the carry of scan"},
    "control_flow": {"w": "meets data in cond"},
    "custom_rules": {
        "w": "meets data in custom_jvp_call",
        "v": "meets data in custom_jvp_call",
        "b": "meets data in custom_vjp_call",
    },
    "penalized": {"w": "meets data in add"},
    "side_by_side": {"c": "computed on before it meets data in dot_general"},
    "lookups": {"rows": "meets data in gather", "w": "its uses overlap in different layouts"},
}


def _explain(network, **options):
    params = network.params(0)
    example = jax.tree.map(lambda x: x[0], network.batch(1, 1))
    key = jax.random.key(2) if network.keyed else None
    return dpoptax.explain(network.loss, params, example, key=key, **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_lists_fallbacks(name):
    explanation = _explain(NETWORKS[name])
    found = {row.parameter.strip("[']"): row.why for row in explanation.fallbacks}
    assert found == FALLBACKS.get(name, {})


@pytest.mark.parametrize(("tokens", "named"), [(512, False), (16384, True)])
def test_note_names_gradients_that_rounding_shortens(tokens, named):
    def tied(params, x):
        return jnp.sum(jnp.sin(params["table"][x] @ params["w"]) @ params["table"].T)

    params = {"table": jnp.ones((100, 16)), "w": jnp.ones((16, 16))}
    found = dpoptax.explain(tied, params, jnp.zeros(tokens, int), batch_size=1)
    rows = {row.parameter: row.kept for row in found.rows}
    assert (rows["['table']"] < 0.95) == named
    assert rows["['w']"] == 1.0
    assert ("['table'] to 0." in found.note) == named
    assert "['w'] to" not in found.note


def test_choice_follows_the_cost():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]))

    def rule(length, width):
        struct = jax.ShapeDtypeStruct
        params = {"w": struct((width, width), jnp.float32)}
        return dpoptax.explain(loss, params, struct((length, width), jnp.float32)).rows[0].rule

    assert rule(1, 256) == "product of two norms"
    assert rule(16, 256) == "inner products"
    assert rule(1024, 32).startswith("formed")


def _sizes(jaxpr):
    for eqn in equations(jaxpr):
        yield from (v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))


@pytest.mark.parametrize("count", [1, 2])
def test_no_array_has_size_of_per_example_gradients(count):
    batch, width, length = 16, 64, 4
    struct = jax.ShapeDtypeStruct
    params = {
        "e": struct((500, width), jnp.float32),
        "w": struct((width, width), jnp.float32),
        "b": struct((width,), jnp.float32),
    }

    def loss(params, tokens):
        x = params["e"][tokens] + params["b"]
        x = jnp.tanh(x @ params["w"]) @ params["w"].T
        return jnp.mean(jax.nn.logsumexp(jax.vmap(jnp.sin)(x)))

    def largest(method):
        points = dpoptax.GradientPoints((params,) * count, (1.0,) * count)
        args = points, struct((batch, length), jnp.int32), struct((batch,), bool)
        jaxpr = jax.make_jaxpr(lambda p, b, m: sum_by(method, loss, dpoptax.l2_clip(1.0), p, b, m))(
            *args
        )
        return max(_sizes(jaxpr.jaxpr))

    assert largest(per_example_sum) >= batch * 500 * width
    assert largest(ghost_clipped_sum) < batch * width * width


def test_explain_uses_under_two_bytes_per_entry():
    stack = jax.ShapeDtypeStruct((16, 512, 512), jnp.float32)

    def loss(stack, x):
        def layer(x, w):
            gate, up = jnp.split(w, 2, axis=1)
            return jnp.tile(jnp.tanh(x @ gate) * (x @ up), 2), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0])

    tracemalloc.start()
    try:
        explanation = dpoptax.explain(loss, stack, jax.ShapeDtypeStruct((4, 512), jnp.float32))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert explanation.fallbacks == ()
    assert peak < 2 * stack.size


def test_known_positions_need_no_per_example_gradient():
    def loss(table, x, places):
        return jnp.sum(jnp.tanh(x + table[places()]))

    table, x = jnp.ones((8, 4)), jnp.ones((3, 4))
    known = functools.partial(loss, places=lambda: jnp.arange(3))
    repeated = functools.partial(loss, places=lambda: jnp.zeros(3, int))
    assert not dpoptax.explain(known, table, x).fallbacks
    assert dpoptax.explain(repeated, table, x).fallbacks


@pytest.mark.parametrize("shapes_only", [False, True])
def test_frozen_arrays_are_arguments(shapes_only):
    """Explains LoRA, with and without the arrays, as with arrays that the loss closes over."""
    frozen = {"words": jnp.ones((9, 4)), "kernel": jnp.ones((4, 4))}
    params = {"a": jnp.ones((4, 2)), "b": jnp.zeros((2, 4))}
    tokens = jnp.arange(5)

    def loss_fn(params, tokens, *, frozen):
        x = frozen["words"][tokens]
        return jnp.sum(jnp.tanh(x @ (frozen["kernel"] + params["a"] @ params["b"])))

    closed = dpoptax.explain(functools.partial(loss_fn, frozen=frozen), params, tokens)
    given = jax.eval_shape(lambda: (params, frozen)) if shapes_only else (params, frozen)
    found = dpoptax.explain(loss_fn, given[0], tokens, frozen=given[1])
    assert found == closed
    assert not found.fallbacks
    assert not found.vanishing
