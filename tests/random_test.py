"""`dpoptax._noise.normal.normal` gives the bits of `jax.random.normal`, wherever it runs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax._noise import normal as _random

SHAPES = [(), (0,), (1,), (7,), (256, 10), (5, 0, 2), (2, 3, 5, 8), (9001,)]
NARROW = [(1, 1), (3, 1, 4), (640, 3)]


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


CASES = [(shape, "float32") for shape in SHAPES] + [((5, 16), "float16"), ((5, 16), "bfloat16")]
BITS = [(shape, "uint32") for shape in SHAPES + NARROW] + [((5, 16), "uint8"), ((5, 16), "uint16")]


@pytest.mark.parametrize(("shape", "dtype"), BITS, ids=str)
def test_random_bits_equal_jax(shape, dtype):
    key = jax.random.key(3)

    @jax.jit
    def both(key):
        unrolled = jax.random.wrap_key_data(jax.random.key_data(key), impl=_random._UNROLLED)
        return [jax.random.bits(key, shape, dtype) for key in (unrolled, key)]

    assert_same_bits(*both(key))


@pytest.mark.parametrize(("shape", "dtype"), [*CASES, ((16,), "complex64")], ids=str)
def test_equals_jax_for_every_shape_and_dtype(shape, dtype):
    key = jax.random.fold_in(jax.random.key(3), len(shape))
    assert_same_bits(_random.normal(key, shape, dtype), jax.random.normal(key, shape, dtype))


@pytest.mark.parametrize("shape", NARROW, ids=str)
def test_narrow_arrays_equal_jax_up_to_the_compilers_choice(shape):
    """Here XLA may compile the same inverse error function to scalar or to vector code."""
    key = jax.random.key(3)
    np.testing.assert_allclose(_random.normal(key, shape), jax.random.normal(key, shape), rtol=1e-6)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("count", [1, 2, 70])
def test_splits_like_jax(impl, count):
    key = jax.random.fold_in(jax.random.key(2, impl=impl), count)
    found, want = _random.split(key, count), jax.random.split(key, count)
    assert found.dtype == want.dtype
    assert_same_bits(jax.random.key_data(found), jax.random.key_data(want))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, -1])
@pytest.mark.parametrize("step", [0, 1, 12345, 2**32 - 1])
def test_equals_jax_for_every_key(seed, step):
    key = jax.random.fold_in(jax.random.key(seed), np.uint32(step))
    assert_same_bits(_random.normal(key, (123,)), jax.random.normal(key, (123,)))


def test_uses_its_own_bits():
    """The comparisons above would also pass if the fallback always ran."""
    key = jax.random.key(0)

    def loops(normal):
        return "stablehlo.while" in jax.jit(lambda key: normal(key, (64,))).lower(key).as_text()

    assert not loops(_random.normal)
    if jax.default_backend() == "cpu":
        assert loops(jax.random.normal)


def test_raw_keys():
    key = jax.random.PRNGKey(5)
    assert_same_bits(_random.normal(key, (8,)), jax.random.normal(key, (8,)))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_fall_back(impl):
    key = jax.random.key(0, impl=impl)
    assert_same_bits(_random.normal(key, (33,)), jax.random.normal(key, (33,)))


def test_float64_falls_back():
    with jax.enable_x64(True):
        key = jax.random.key(0)
        expected = jax.random.normal(key, (33,), "float64")
        assert expected.dtype == "float64"
        assert_same_bits(_random.normal(key, (33,), "float64"), expected)


def test_original_threefry_falls_back():
    key = jax.random.key(0)
    default = jax.random.normal(key, (33,))
    with jax.threefry_partitionable(False):
        expected = jax.random.normal(key, (33,))
        assert not np.array_equal(default, expected)
        assert_same_bits(_random.normal(key, (33,)), expected)


def wide_counters(shape, platform):
    """Whether the program counts in 64 bits, which the unrolled one never does."""
    traced = jax.jit(lambda key: _random.normal(key, shape)).trace(jax.random.key(0))
    return "ui64" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_huge_arrays_fall_back():
    assert not wide_counters((2**16, 2**16), "cpu")
    assert not wide_counters((1, 2**32), "cpu")
    assert wide_counters((2**16, 2**16 + 1), "cpu")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_fall_back(platform):
    assert wide_counters((64,), platform)


def test_under_vmap_and_scan():
    keys = jax.random.split(jax.random.key(1), 6).reshape(2, 3)

    def batched(normal):
        return jax.jit(jax.vmap(jax.vmap(lambda key: normal(key, (4, 8), jnp.float32))))(keys)

    def scanned(normal):
        def body(total, step):
            noise = normal(jax.random.fold_in(keys[0, 0], step), (4, 8), jnp.float32)
            return total, noise

        return jax.jit(lambda: jax.lax.scan(body, 0.0, jnp.arange(3))[1])()

    for transformed in (batched, scanned):
        assert_same_bits(transformed(_random.normal), transformed(jax.random.normal))


def test_vmap_over_operand_leaves_the_noise_shared():
    key = jax.random.key(2)
    noisy = jax.vmap(lambda x: x + _random.normal(key, ()))(jnp.zeros(3))
    assert_same_bits(noisy, jnp.full(3, jax.random.normal(key)))


SHARDED = r"""
import re
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dpoptax._noise import normal as _random

key = jax.random.key(7)
assert jax.device_count() == 4
cases = [((8,), P("x")), ((), P()), ((16, 8), P("x")), ((8, 32), P(None, "y")),
         ((4, 3, 32), P("y", None, "x")), ((16, 8), P(("x", "y")))]
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    for shape, spec in cases:
        sharding = NamedSharding(mesh, spec)
        expected = np.asarray(jax.random.normal(key, shape))
        with jax.set_mesh(mesh):
            if axis_type == AxisType.Explicit:
                f = jax.jit(lambda key: _random.normal(key, shape, out_sharding=sharding))
            else:
                f = jax.jit(lambda key: _random.normal(key, shape), out_shardings=sharding)
            text = f.lower(key).compile().as_text()
            actual = f(key)
        assert actual.sharding.is_equivalent_to(sharding, len(shape)), (axis_type, spec)
        assert np.array_equal(np.asarray(actual), expected), (axis_type, shape, spec)
        assert not re.search(r"all-|collective|permute", text), (axis_type, shape, text)
        sizes = [np.prod(eval(f"({dims},)")) for dims in re.findall(r"u32\[([0-9,]+)\]", text)]
        assert max(sizes) <= max(2, np.prod(sharding.shard_shape(shape))), (axis_type, spec, sizes)

mesh = jax.make_mesh((4,), ("x",))
row = lambda key: _random.normal(jax.random.fold_in(key, jax.lax.axis_index("x")), (1, 8))
rows = jax.jit(jax.shard_map(row, mesh=mesh, in_specs=P(), out_specs=P("x")))(key)
expected = [jax.random.normal(jax.random.fold_in(key, i), (8,)) for i in range(4)]
assert np.array_equal(np.asarray(rows), np.stack(expected))
print("sharded normals are equal")
"""


@pytest.mark.slow
def test_sharded_over_devices_without_communication():
    env = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    env["JAX_PLATFORMS"] = "cpu"
    result = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "sharded normals are equal" in result.stdout
