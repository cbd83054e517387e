"""Tests numbers of every magnitude against the working range of clipped sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax.auditing import _worst_example as adversary
from tests import helpers, programs
from tests.devices import check_on_eight_devices

pytestmark = pytest.mark.optimized

SIZE = 8
CLIPS = {
    "l2": dpoptax.l2_clip(1e-3),
    "smallest": dpoptax.l2_clip(1e-12),
    "largest": dpoptax.l2_clip(1e9),
    "AUTO-V": dpoptax.automatic_clip(0.1, gamma=0.0),
}
# Magnitudes of the two sides of an example, with both ends of the range and of float32.
EDGES = (2.0**39, 2.0**40, 2.0**40 * (1 - 2.0**-24))
SIDES = (0.0, 1e-45, 1e-38, 1e-30, 1e-19, 1e-12, 1.0, 1e8, *EDGES, 1e13, 1e19, 1e30, 3e38)
SPECIAL = (np.nan, np.inf, -np.inf)
DTYPES = ("float32", "bfloat16", "float16")
STREAM = {"clip": dpoptax.per_layer_clip(1e-3), "method": "streaming"}
WAYS = {
    "auto": {},
    "bfloat16": {"precision": "bfloat16"},
    "vmap": {"method": "vmap"},
    "recompute": {"method": "recompute"},
    "recompute in bfloat16": {"method": "recompute", "precision": "bfloat16"},
    "streaming": STREAM,
    "streaming in bfloat16": STREAM | {"precision": "bfloat16"},
    "in parts": {"microbatch_size": 3},
}


def _compiled(program, default, dtype="float32", weights=(1.0,), **options):
    """Returns the compiled sum, the shapes of the data, and C."""
    loss, shapes, data = programs.PROGRAMS[program]
    params = [helpers.floats(p, dtype) for p in programs.parameters(shapes)]
    clip = options.pop("clip", default)
    grad_fn = dpoptax.clipped_grad(loss, clip, **options)
    points = tuple([p * (1 + 0.1 * j) for p in params] for j in range(len(weights)))
    points = dpoptax.GradientPoints(points, weights)
    return jax.jit(lambda batch, mask: grad_fn(points, batch, mask).sum), data, clip.sensitivity


def _moves(total, shapes, dtype="float32", sides=SIDES):
    """Yields how far examples of all pairs of magnitudes move a sum."""
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        others = tuple(rng.normal(size=(SIZE, *s)).astype(dtype) for s in shapes)
        unit = [rng.choice([-1.0, 1.0, 0.5], size=s) for s in shapes]
        pairs = [*itertools.product(sides, repeat=2), *itertools.product(SPECIAL, (1.0, 1e-30))]
        for first, second in pairs:
            for one_entry in (False, True):
                example = [np.float64(x) * s for x, s in zip(unit, (first, second), strict=True)]
                if one_entry:  # next to ordinary ones
                    example = [np.float64(x) for x in unit]
                    for x, s in zip(example, (first, second), strict=True):
                        x.reshape(-1)[0] = s
                yield adversary.moved(total, others, tuple(example))


@pytest.mark.parametrize(
    ("program", "clip", "way"),
    [
        ("regression", "l2", "auto"),
        ("one position", "AUTO-V", "auto"),
        ("short", "smallest", "auto"),
        ("convolution", "largest", "auto"),
        ("standardized", "l2", "bfloat16"),
        ("opaque", "AUTO-V", "auto"),
        ("regression", "l2", "vmap"),
        ("scanned", "smallest", "recompute"),
        ("batched", "l2", "streaming in bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(programs.PROGRAMS, CLIPS, WAYS)
            if case[0] not in programs.COMPUTED_KERNELS or case[2][0] not in "rs"
        ),
    ],
)
def test_example_of_any_magnitude_moves_sum_by_at_most_the_bound(program, clip, way):
    total, shapes, bound = _compiled(program, CLIPS[clip], **WAYS[way])
    assert max(_moves(total, shapes)) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("weights", [(43.0, -42.0), (0.5, 0.5), (1e30, -1e30), (1e-30, 1.0)])
def test_bound_holds_for_points_of_any_magnitude(weights):
    total, shapes, bound = _compiled("regression", CLIPS["l2"], weights=weights)
    assert max(_moves(total, shapes, sides=SIDES[::2])) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("clip", ["l2", "AUTO-V"])
def test_bound_holds_for_narrow_dtypes(clip, dtype):
    total, shapes, bound = _compiled("regression", CLIPS[clip], dtype)
    assert max(_moves(total, shapes, dtype, SIDES[::2])) <= bound * (1 + 1e-5)


@pytest.mark.parametrize("side", [0, 1], ids=["data", "cotangent"])
@pytest.mark.parametrize("value", [2.0**40, 1e13, 3e38, *SPECIAL])
@pytest.mark.parametrize(
    "program", ["one position", "regression", "batched", "convolution", "opaque"]
)
def test_example_outside_of_the_range_adds_zero(program, value, side):
    """The other side is ordinary, so that only this number decides."""
    loss, shapes, data = programs.PROGRAMS[program]
    loss = programs.linear if program == "regression" else loss
    grad_fn = dpoptax.clipped_grad(loss, CLIPS["l2"])
    params = programs.parameters(shapes)
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(SIZE, *s)).astype(np.float32) for s in data]
    batch[side][-1] = value
    total = jax.jit(lambda batch, mask: grad_fn(params, batch, mask).sum)
    used, masked = (total(tuple(batch), np.arange(SIZE) < n) for n in (SIZE, SIZE - 1))
    jax.tree.map(np.testing.assert_array_equal, used, masked)


def test_example_inside_of_the_range_is_clipped():
    grad_fn = dpoptax.clipped_grad(programs.linear, 1.0)
    x, d = np.zeros((2, 2, 1, 3), np.float32)
    x[0, 0, 0], d[0, 0, 1] = 2.0**39.9, 2.0**-2
    x[1, 0, 0], d[1, 0, 1] = 2.0**-2, 2.0**39.9
    (total,) = grad_fn([jnp.zeros((3, 3))], (x, d)).sum
    want = np.zeros((3, 3))
    want[0, 1] = 2.0
    np.testing.assert_allclose(total, want, rtol=2e-3)


@pytest.mark.parametrize(
    "make",
    [
        dpoptax.l2_clip, dpoptax.automatic_clip, dpoptax.normalized_clip,
        dpoptax.contrib.psac_clip, dpoptax.per_layer_clip, dpoptax.contrib.adaptive_clip,
    ],
)  # fmt: skip
def test_refuses_bounds_below_the_range(make):
    make(1e-12)
    with pytest.raises(ValueError, match="must be at least 1e-12.*Scale the loss and the bound"):
        make(9e-13)


@pytest.mark.slow
def test_bound_holds_on_eight_devices():
    check_on_eight_devices("slow", "tests/multidevice/working_range.py")
