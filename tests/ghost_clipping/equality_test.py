"""Tests that ghost clipping equals per-example gradients on every kind of network."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.factor_products import Segment
from dpoptax._ghost_clipping.records.record_points import Recording, record_point
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import ghost_clipped_sum
from dpoptax._losses.read_program import read_program
from dpoptax._losses.trace_loss import trace_loss
from tests.ghost_clipping.comparison import both, clipped_sum, close, points_of
from tests.helpers import floats, slow_but, sum_by
from tests.networks import NETWORKS, Network

pytestmark = pytest.mark.usefixtures("no_room")

SIZE = 5
# These networks have the rules and structure of others.
COVERED = {
    *("cnn", "parts_added", "resnet", "shared_layers", "side_by_side", "steps_over_stacks", "vit"),
    *("transformer", "tied_embeddings"),  # attention in adversary_test's models
    *("lstm", "scanned_layers"),  # nested_scans covers their steps
    *("convolution_over_time", "mlp"),  # odd_convolutions, and mlp at other numbers of points
    "lookups",  # lookups_test
    "weight_standardization",  # pulling_test, and a standardized kernel in adversary_test
    "dropout",  # keys of examples in gradients_test
    "tokens_beside",  # adversary_test
    "lora",  # merged into a kernel in pulling_test, and in language_models_test
}


def _batch(network, size=SIZE):
    return network.batch(2, size)


_TWO_POINTS = {"custom_rules", "nested_scans", "odd_convolutions", "rematerialized"}
_ONE_POINT = NETWORKS.keys() - COVERED - _TWO_POINTS


@pytest.mark.parametrize(("names", "count"), [(_ONE_POINT, 1), (_TWO_POINTS, 2)], ids=["1", "2"])
def test_combined_networks_equal_per_example_gradients(names, count):
    """Sums the losses. Each network has its own layer of the clip and its own comparison."""
    names = sorted(names)

    def loss(params, example, key):
        return sum(
            NETWORKS[name].loss(params[name], example[name], *[key] * NETWORKS[name].keyed)
            for name in names
        )

    together = Network(
        loss,
        lambda seed: {name: NETWORKS[name].params(seed) for name in names},
        lambda seed, size: {name: NETWORKS[name].batch(seed, size) for name in names},
        keyed=True,
    )
    clip = dpoptax.per_layer_clip(dict.fromkeys(names, 0.3))
    got, want = both(together, clip, points_of(together, count), _batch(together))
    for name in names:
        close(got[name], want[name])


@pytest.mark.slow
@pytest.mark.spread(15)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_per_example_gradients_at_several_points(name, count):
    network = NETWORKS[name]
    close(*both(network, dpoptax.l2_clip(0.3), points_of(network, count), _batch(network)))


CLIPS = {
    "normalized": dpoptax.normalized_clip(0.3),
    "automatic per layer": dpoptax.per_layer_clip(dpoptax.automatic_clip(0.3)),
    "of each kind": dpoptax.per_layer_clip(
        {
            "w": dpoptax.automatic_clip(0.3, gamma=0.0),
            "b": dpoptax.contrib.psac_clip(0.2),
            "v": dpoptax.normalized_clip(0.3),
            "c": 0.4,
        }
    ),
}


@pytest.mark.parametrize("name", slow_but(("of each kind",), CLIPS))
def test_equals_per_example_gradients_for_each_clip(name):
    network = NETWORKS["mlp"]
    close(*both(network, CLIPS[name], points_of(network, 1), _batch(network)))


AUTO_V = dpoptax.automatic_clip(0.3, gamma=0.0)


@pytest.mark.parametrize("clip", [AUTO_V, dpoptax.per_layer_clip(AUTO_V)], ids=["flat", "layers"])
def test_equals_per_example_gradients_in_the_working_range(clip):
    network = NETWORKS["mlp"]

    def scaled(params, example):
        example, size = example
        return size * network.loss(params, example)

    # Passed as data, so that all sizes share the compiled program.
    for size in (1e-8, 1e-4, 1e4, 1e8):
        batch = (_batch(network), floats(np.full(SIZE, size)))
        close(*both(network._replace(loss=scaled), clip, points_of(network, 1), batch))


def _one_position(params, example):
    """Uses a batched product, a scaled parameter and a lookup, each with one position (T = 1)."""
    x, token, size = example
    hidden = jnp.tanh(jnp.einsum("kd,kde->ke", x, params["stack"])).reshape(-1)
    out = hidden @ (-2.0 * params["scaled"]) + jnp.sum(params["table"][token])
    return jnp.sum(size * jnp.sin(out) + jnp.sum(size * x[:, :1] * params["stack"][:, 0, :2]))


def test_single_position_factors_in_the_working_range():
    rng = np.random.default_rng(3)
    shapes = {"stack": (3, 4, 5), "scaled": (15, 2), "table": (7, 3)}
    params = {name: floats(rng.normal(size=shape)) for name, shape in shapes.items()}
    network = NETWORKS["mlp"]._replace(loss=_one_position)
    points = dpoptax.GradientPoints((params,), (1.0,))
    size = floats([1.0, 1e-6, 1e8, 1e30, 1e-8, np.nan, np.inf, 0.0, 1.0])
    x = rng.normal(size=(9, 3, 4))
    x[3] *= 1e-6
    x[4, 0] *= 1e4
    token = jax.device_put(rng.integers(0, 7, 9))
    close(*both(network, AUTO_V, points, (floats(x), token, size), np.arange(9) < 8))


def test_remainder_of_canceling_terms_is_clipped_more():
    # The rows are almost equal and the columns sum to zero. Inner products cancel to 1e-8 of their
    # size, which is below the rounding of float32.
    def loss(params, example):
        x, c = example
        return jnp.sum((x @ params["w"]) * c)

    rng = np.random.default_rng(0)
    x = floats(1.0 + 1e-4 * rng.normal(size=(1, 6, 8)))
    c = rng.normal(size=(1, 6, 9)).astype(np.float32)
    c = floats(c - c.mean(1, keepdims=True))
    network = NETWORKS["mlp"]._replace(loss=loss)
    points = dpoptax.GradientPoints(({"w": floats(np.zeros((8, 9)))},), (1.0,))
    got, want = both(network, dpoptax.normalized_clip(1e-6), points, (x, c))
    lengths = [np.linalg.norm(total["w"]) for total in (got, want)]
    assert 0 < lengths[0] < 0.2 * lengths[1] < 0.2
    np.testing.assert_allclose(got["w"] / lengths[0], want["w"] / lengths[1], atol=1e-3)


def test_equals_per_example_gradients_if_weights_cancel():
    network = NETWORKS["mlp"]
    params = network.params(0)
    near = jax.tree.map(lambda p: floats(np.asarray(p) * np.float32(1 + 1e-3)), params)
    points = dpoptax.GradientPoints((params, near), (400.0, -399.0))
    close(*both(network, dpoptax.normalized_clip(1.0), points, _batch(network)), tolerance=1e-3)


def test_joined_segments_give_sum_of_gradients():
    rng = np.random.default_rng(0)

    def array(*shape):
        return floats(rng.standard_normal(shape))

    segments = [Segment(array(2, 3, 4, 32), array(2, 3, 4, 40)) for _ in range(3)]
    want = sum(np.einsum("bktr,bktc->bkrc", s.rows, s.columns) for s in segments)
    assert len(factor_products._join_segments(segments)) == 1
    np.testing.assert_allclose(
        factor_products.multiply_factors(segments, (3, 32, 40)), want, rtol=1e-4, atol=1e-5
    )
    # Segments that are small next to their factors are not worth copying.
    small = [s._replace(rows=s.rows[..., :2]) for s in segments]
    assert factor_products._join_segments(small) is small


@pytest.mark.parametrize("name", ["odd_convolutions", "convolution_over_time"])
def test_row_parts_join_to_rows(name):
    network = NETWORKS[name]
    params, batch = network.params(0), _batch(network, 1)
    example = jax.tree.map(lambda x: x[0], batch)
    program = read_program(trace_loss(network.loss, params, example, None, has_aux=False))
    records = record_point(program, jax.tree.leaves(params), jax.tree.leaves(batch), Recording())
    counts = []
    for use in program.uses:
        arrays = records.operands[use.index][0], records.cotangents[use.index][0]
        rows, columns = use.rule.factorize(*arrays)
        parts, repeated = zip(*use.rule.row_parts(*arrays), strict=True)
        np.testing.assert_array_equal(jnp.concatenate(parts, axis=-1), rows)
        np.testing.assert_array_equal(jnp.stack(repeated), jnp.stack([columns] * len(parts)))
        counts.append(len(parts))
    assert max(counts) > 1


def test_low_precision_parameters():
    network = NETWORKS["mlp"]
    points = points_of(network, 1)
    low = jax.tree.map(lambda p: floats(p, jnp.bfloat16), points.points)
    points = dpoptax.GradientPoints(low, (1.0,))
    got, want = both(network, dpoptax.l2_clip(0.3), points, _batch(network))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))
    close(got, want, tolerance=3e-2)


def test_double_precision():
    with jax.enable_x64(True):
        network = NETWORKS["mlp"]
        points = points_of(network, 2)
        double = jax.tree.map(lambda p: floats(p, jnp.float64), points.points)
        points = dpoptax.GradientPoints(double, points.weights)
        x, y = _batch(network)
        close(*both(network, dpoptax.l2_clip(0.3), points, (floats(x, jnp.float64), y)))


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        (lambda row: row, False, r"scalar for one example.*shape \(4,\)"),
        (lambda row: (row[0], row), False, "scalar for one example, got a tuple.*has_aux=True"),
        (lambda row: (row, row[0]), True, r"scalar for one example.*shape \(4,\)"),
        (jnp.argmax, False, "a real float, got int32"),
        (lambda row: row[0], True, r"a pair \(loss, aux\) for has_aux=True"),
    ],
)
def test_refuses_loss_that_is_not_a_scalar(returned, has_aux, message, method):
    loss = lambda w, row: returned(w * row)  # noqa: E731
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0), has_aux=has_aux, method=method)
    with pytest.raises(TypeError, match=message):
        grad_fn(dpoptax.gradient_points((), jnp.ones(4)), jnp.ones((2, 4)))


def test_bundled_gradients_are_measured_with_their_own_groups():
    """On a mesh of GPUs or TPUs, larger formed gradients share an array than on CPUs."""
    names, size = "abc", 1500

    def loss(params, x):
        return sum(jnp.sum(jnp.tanh((i + 1) * params[k] * x)) for i, k in enumerate(names))

    network = Network(
        loss,
        lambda seed: {k: floats(np.random.default_rng(seed).normal(size=size)) for k in names},
        lambda seed, rows: floats(np.random.default_rng(seed).normal(size=(rows, size))),
    )
    bundled = functools.partial(ghost_clipped_sum, bundled_size=SIZE * size)
    for clip, arrays in [
        (dpoptax.l2_clip(0.5), 1),
        (dpoptax.per_layer_clip({"a": 0.2, "b": 0.3, "c": 0.4}), 3),
    ]:
        args = network, clip, points_of(network, 2), _batch(network)
        close(clipped_sum(bundled, *args), clipped_sum(ghost_clipped_sum, *args))
        sums = functools.partial(sum_by, loss_fn=loss, clip=clip, points=args[2], batch=args[3])
        assert len(sums(ghost_clipped_sum, mask=np.ones(SIZE, bool))[0]) == 3
        assert len(sums(bundled, mask=np.ones(SIZE, bool))[0]) == arrays
