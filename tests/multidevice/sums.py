"""Tests that clipped sums on eight virtual devices equal those on one device, in every layout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._clipped_sum.clipped_sum import check_clipped_sum
from dpoptax._rounding import block_sums
from tests import programs
from tests.helpers import floats, no_room, sum_by
from tests.multidevice.problem import (
    CLIP,
    FSDP,
    KINDS,
    assert_close,
    conv_loss,
    conv_params,
    largest_error,
    loss_fn,
    make_batch,
    make_mesh,
    make_params,
    put,
)

EXAMPLES = 16
MASK = np.arange(EXAMPLES) % 5 != 2
KEY = jax.random.key(3)
IDS = 7 * np.arange(EXAMPLES) % 1000


def points_at(params, other):
    """Returns two points, as in DiSK and DP-PMLF."""
    return dpoptax.GradientPoints((params, other), (1.5, -0.5))


@pytest.fixture(scope="module")
def batch():
    return make_batch(0, EXAMPLES)


@pytest.fixture(scope="module")
def want(batch):
    """Returns the sum on one device, from per-example gradients without micro-batches."""
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, CLIP, method="vmap"))
    with no_room():
        return grad_fn(points_at(make_params(0), make_params(1)), batch, MASK, key=KEY, ids=IDS).sum


LAYOUTS = [
    (*case, kind)
    for case in [(1, 3, "auto"), (2, None, "auto"), (4, 3, "auto"), (8, 1, "auto"), (8, 2, "vmap")]
    for kind in KINDS
]


@pytest.mark.spread(4)
@pytest.mark.slow
@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(("devices", "microbatch_size", "method", "kind"), LAYOUTS, ids=str)
def test_sum_with_replicated_parameters_equals_one_device(
    kind, devices, microbatch_size, method, batch, want
):
    mesh = make_mesh((devices,), ("data",), kind)
    points = put(points_at(make_params(0), make_params(1)), mesh, P())
    options = {"microbatch_size": microbatch_size, "method": method}
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, mesh=mesh, **options)
    split, mask = put((batch, MASK), mesh, P("data"))
    total = jax.jit(grad_fn)(points, split, mask, key=KEY, ids=IDS).sum
    assert_close(total, want)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(total))


@pytest.mark.slow
@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("axes", ["data", ("model", "data")], ids=str)
def test_sum_with_sharded_parameters_equals_one_device(kind, axes, batch, want):
    mesh = make_mesh((2, 4), ("model", "data"), kind)
    specs = FSDP | {"dense": P(("data", "model")), "bias": P("model")}
    place = lambda seed: put(make_params(seed), mesh, specs)  # noqa: E731
    points = points_at(place(0), place(1))
    given = specs if kind == KINDS[0] else None  # explicit axes carry their specs
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, mesh=mesh, axis_name=axes, param_specs=given)
    total = jax.jit(grad_fn)(points, batch, MASK, key=KEY, ids=IDS).sum
    assert_close(total, want)
    for name, leaf in total.items():
        assert leaf.sharding.is_equivalent_to(points.points[0][name].sharding, leaf.ndim), name


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sums_on_a_grid_are_equal_on_any_number_of_devices(kind):
    """Gradients are multiples of 1/16, so that they are exact in every layout."""
    rng = np.random.default_rng(0)
    batch = tuple(floats(rng.integers(-9, 9, (EXAMPLES, 3, n)) / 4) for n in (6, 5))
    points = dpoptax.gradient_points((), [jnp.zeros((6, 5))])
    options = {"grid": 2.0**-18}
    want = dpoptax.clipped_grad(programs.linear, CLIP, **options)(points, batch, MASK).sum[0]
    for devices in (2, 8):
        mesh = make_mesh((devices,), ("data",), kind)
        grad_fn = jax.jit(dpoptax.clipped_grad(programs.linear, CLIP, mesh=mesh, **options))
        np.testing.assert_array_equal(grad_fn(points, batch, MASK).sum[0], want)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_keys_depend_on_record_not_on_device(kind):
    """Keys depend on the record, and the sum leaves the devices sealed."""

    def noisy(w, x, key):
        return jnp.sum(jnp.sin(w * x)) * jax.random.normal(key)

    mesh = make_mesh((8,), ("data",), kind)
    points = dpoptax.gradient_points((), jnp.ones(3))
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    ids = np.arange(16)[::-1] * 5
    alone = jax.jit(dpoptax.clipped_grad(noisy, CLIP))(points, rows, key=KEY, ids=ids)
    grad_fn = jax.jit(dpoptax.clipped_grad(noisy, CLIP, mesh=mesh))
    clipped = grad_fn(points, rows, key=KEY, ids=ids)
    assert_close(clipped.sum, alone.sum)
    check_clipped_sum(clipped)
    shuffled = np.random.default_rng(1).permutation(16)
    other = grad_fn(points, rows[shuffled], key=KEY, ids=ids[shuffled])
    assert_close(other.sum, alone.sum)


# Three ways to get a wrong sum or wrong noise without an error. Each test first shows that the
# naive program is wrong, so it would notice if the case disappeared.


def test_sharded_convolutions_are_correct(batch):
    mesh = make_mesh((8,), ("data",), KINDS[0])
    points = dpoptax.gradient_points((), conv_params())
    naive = jax.vmap(jax.grad(conv_loss), (None, 0))
    alone = dpoptax.clipped_grad(conv_loss, CLIP, method="vmap")
    ours = dpoptax.clipped_grad(conv_loss, CLIP, method="vmap", mesh=mesh)
    split = put(batch, mesh, P("data"))
    params = points.points[0]
    naive, ours = jax.jit(naive), jax.jit(ours)
    assert largest_error(naive(params, split), naive(params, batch)) > 1e-2
    assert largest_error(ours(points, split).sum, jax.jit(alone)(points, batch).sum) < 1e-6
    with pytest.raises(ValueError, match="sharded batch"):
        alone(points, split)


def test_refuses_batch_on_explicit_axes_without_mesh(batch):
    mesh = make_mesh((8,), ("data",), KINDS[1])
    points = dpoptax.gradient_points((), conv_params())
    with pytest.raises(ValueError, match=r"sharded batch.*mesh=mesh"):
        jax.jit(dpoptax.clipped_grad(conv_loss, CLIP))(points, put(batch, mesh, P("data")))


def test_clips_examples_not_whole_shards(batch):
    mesh = make_mesh((8,), ("data",), KINDS[0])
    points = dpoptax.gradient_points((), conv_params())

    def local(points, batch, mask):
        total = sum_by(per_example_sum, conv_loss, CLIP, points, batch, mask)
        return lax.psum(total, "data")

    naive = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=True
    )
    want = dpoptax.clipped_grad(conv_loss, CLIP, method="vmap")(points, batch, MASK).sum
    assert largest_error(jax.jit(naive)(points, batch, MASK), want) > 1e-2
    ours = dpoptax.clipped_grad(conv_loss, CLIP, method="vmap", mesh=mesh)
    assert largest_error(ours(points, batch, MASK).sum, want) < 1e-6


def test_refuses_uneven_batches_and_wrong_axes():
    mesh = make_mesh((8,), ("data",), KINDS[0])
    points = dpoptax.gradient_points((), conv_params())
    with pytest.raises(ValueError, match=r"8 devices .* 10 examples.*multiple_of=8"):
        dpoptax.clipped_grad(conv_loss, CLIP, mesh=mesh)(points, make_batch(0, 10))
    with pytest.raises(ValueError, match="`axis_name` must .* got 'batch'"):
        dpoptax.clipped_grad(conv_loss, CLIP, mesh=mesh, axis_name="batch")
    with pytest.raises(ValueError, match="needs a `mesh`"):
        dpoptax.clipped_grad(conv_loss, CLIP, param_specs=P())


@pytest.mark.parametrize("split_params", [False, True])
def test_collectives_of_the_compiled_sum(split_params, batch):
    mesh = make_mesh((8,), ("data",), KINDS[1])
    params = conv_params()
    if split_params:
        specs = {"kernel": P(None, None, None, "data"), "dense": P("data")}
        params = put(params, mesh, specs)
    points = dpoptax.gradient_points((), params)
    grad_fn = jax.jit(dpoptax.clipped_grad(conv_loss, CLIP, mesh=mesh, microbatch_size=1))
    split = put(batch, mesh, P("data"))
    text = grad_fn.lower(points, split).compile().as_text()
    found = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|[a-z-]*permute)\(", text)
    if not split_params:
        assert found == ["all-reduce"]
    else:  # one all-gather per sharded parameter; sums are reduce-scattered
        counts = {kind: found.count(kind) for kind in set(found)}
        assert counts.pop("all-gather") <= 2
        assert counts.pop("reduce-scatter") <= 2
        assert not counts
        gathered = [
            np.prod([int(n) for n in shape.split(",")])
            for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
        ]
        assert all(size <= max(p.size for p in params.values()) for size in gathered)


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sums_of_many_devices_are_added_as_integers(split, batch, want, monkeypatch):
    monkeypatch.setattr(block_sums, "uses_integer_totals", lambda whole: True)
    mesh = make_mesh((8,), ("data",), KINDS[0])
    specs = FSDP if split else dict.fromkeys(FSDP, P())
    points = points_at(*(put(make_params(seed), mesh, specs) for seed in (0, 1)))
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, mesh=mesh, param_specs=specs, method="vmap")
    compiled = jax.jit(grad_fn).lower(points, batch, MASK, key=KEY, ids=IDS).compile()
    assert re.search(r"s32\[.*(all-reduce|reduce-scatter)\(", compiled.as_text())
    assert_close(compiled(points, batch, MASK, key=KEY, ids=IDS).sum, want)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_refuses_loss_with_collectives_over_examples(method, batch):
    mesh = make_mesh((8,), ("data",), KINDS[0])
    points = dpoptax.gradient_points((), conv_params())
    mixing = lambda params, example: lax.pmean(conv_loss(params, example), "data")  # noqa: E731
    with pytest.raises(TypeError, match="over the axis 'data'"):
        dpoptax.clipped_grad(mixing, CLIP, method=method, mesh=mesh)(points, batch)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_refuses_gradients_summed_over_devices_before_clip(method, batch):
    mesh = make_mesh((8,), ("data",), KINDS[0])
    points = dpoptax.gradient_points((), conv_params())
    grad_fn = dpoptax.clipped_grad(conv_loss, CLIP, method=method)

    def inside(check_vma):
        return jax.shard_map(
            lambda points, batch: grad_fn(points, batch).sum,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )

    with pytest.raises(ValueError, match=r"varies over \['data'\].*mesh=mesh"):
        jax.eval_shape(inside(check_vma=True), points, batch)
    jax.eval_shape(inside(check_vma=False), points, batch)


def test_frozen_weights_can_be_indexed(batch):
    mesh = make_mesh((8,), ("data",), KINDS[0])
    params = make_params(0)
    words = np.pad(params.pop("embedding"), ((0, 5), (0, 0)))  # 16 rows, which split evenly
    frozen = {"embedding": words}

    def clipped(read, frozen, params, batch, **devices):
        loss = lambda params, example: loss_fn({**read(frozen), **params}, example)  # noqa: E731
        return dpoptax.clipped_grad(loss, CLIP, **devices)(params, batch, MASK).sum

    on_mesh = put(frozen, mesh, P("data")), put(params, mesh, P()), put(batch, mesh, P("data"))
    read = jax.jit(functools.partial(clipped, lax.stop_gradient, mesh=mesh))
    one_device = jax.jit(functools.partial(clipped, lambda frozen: frozen))
    assert_close(read(*on_mesh), one_device(frozen, params, batch))
    # JAX 0.10 and 0.11 refuse to index the array itself.
    notes = ["stop_gradient"]
    try:
        jax.jit(functools.partial(clipped, lambda frozen: frozen, mesh=mesh))(*on_mesh)
    except ValueError as error:
        notes = error.__notes__
    assert any("stop_gradient" in note for note in notes)
