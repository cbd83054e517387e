"""Tests bounds, noise, exact sums and reproducibility on the default device."""

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import dpoptax
from benchmarks.gpu import contention
from benchmarks.gpu.schedule import Task
from benchmarks.models import transformer
from dpoptax.auditing import _worst_example as adversary
from tests import programs

# Rounding may move a sum by this much more than the bound.
TOLERANCE = 1e-4
OTHERS, BOUND = 7, 0.1
# Calls that show whether results repeat, and the largest difference in units of C if not.
REPEATS, ROUNDING = 100, 1e-5
# Programs whose layers come from a library, which may be missing.
LIBRARIES = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}
# TF32 on: JAX's default on a GPU. TF32 off: products of float32 in full precision.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "TF32": ("tensorfloat32", {}),
    "no TF32": ("highest", {}),
    "default, precision=bfloat16": ("default", {"precision": "bfloat16"}),
    "TF32, vmap": ("tensorfloat32", {"method": "vmap"}),
}


def tasks(small: bool) -> list[Task]:
    """Returns the tasks of this section, the most important first."""
    size = 20_000 if small else 4_000_000
    found = [
        Task("noise", 8.0, partial(noise_statistics, size)),
        Task("noise in fixed point", 8.0, partial(noise_statistics, size, fixed_point=True)),
        Task("releases in fixed point as on CPU", 8.0, partial(releases_as_on_cpu, size // 4)),
        Task("sums on a grid as on CPU", 8.0, sums_as_on_cpu),
        Task("scatters under contention", 15.0, partial(contention.measure, small)),
        Task("resume", 15.0, resume),
    ]
    everything = programs.PROGRAMS | programs.MODELS
    names = ["regression", "LoRA"] if small else list(everything)
    for mode in list(MODES)[: 2 if small else None]:
        chosen = [name for name in names if "vmap" not in mode or name in programs.PROGRAMS]
        for name in chosen:
            library = LIBRARIES.get(name)
            if library is None or importlib.util.find_spec(library):
                found.append(Task(f"{name}, {mode}", 4.0, partial(attack, name, mode, small)))
    return found


def describe(result: dict[str, Any]) -> str:
    """Returns a line about a result."""
    numbers = [
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.items()
        if name != "passed"
    ]
    return ("ok, " if result["passed"] else "FAILED, ") + ", ".join(numbers)


def attack(program: str, mode: str, small: bool = False) -> dict[str, Any]:
    """Searches for the example that moves the sum of a program the most."""
    loss, shapes_or_maker, shapes = (programs.PROGRAMS | programs.MODELS)[program]
    params = programs.parameters(shapes_or_maker)
    if loss is programs.regression:  # so that the pairs of the search cancel
        params = [programs.zeros(*p.shape) for p in params]
    rng = np.random.default_rng(1)
    batch = tuple(rng.normal(size=(OTHERS + 1, *s)).astype(np.float32) for s in shapes)
    matmul_precision, options = MODES[mode]
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.l2_clip(BOUND), **options)
    total = jax.jit(lambda batch, mask: grad_fn(params, batch, mask).sum)
    with jax.default_matmul_precision(matmul_precision):
        masked, again = _masked_move(total, batch)
        starts, steps = (7, 2) if small else (14, 10)
        found, _ = adversary.climb(total, batch, seed=0, starts=starts, steps=steps)
    largest = float(found) / BOUND
    # Where the order of additions changes, a masked example may seem to move the last bits.
    passed = 0.0 < largest <= 1.0 + TOLERANCE and masked <= (ROUNDING * BOUND if again else 0.0)
    return {
        "passed": passed,
        "largest move / C": largest,
        "masked example moves / C": masked / BOUND,
        "same call moves / C": again / BOUND,
    }


def _masked_move(total: Callable[..., Any], batch: Any) -> tuple[float, float]:
    """Returns how far a masked example moves the sum, and how far the same call moves it.

    The first number is infinite if an empty batch does not give zero, or a sum has NaN. The second
    is positive if the device adds the rows of a lookup or segment sum in another order each time.
    """
    others = np.arange(OTHERS + 1) < OTHERS
    expected, empty = _flat(total(batch, others)), _flat(total(batch, np.zeros_like(others)))
    if empty.any() or not np.isfinite(expected).all():
        return math.inf, 0.0
    again = max(_distance(total(batch, others), expected) for _ in range(REPEATS))
    moves = []
    for strange in (0.0, 1e30, np.nan, np.inf):
        changed = tuple(np.array(x) for x in batch)
        for x in changed:
            x[-1] = strange
        moves.append(_distance(total(changed, others), expected))
    return max(moves), again


def _distance(total: Any, expected: np.ndarray) -> float:
    """Returns the distance of two sums, infinite with NaN; zero only if all bits are equal."""
    found = _flat(total)
    if found.tobytes() == expected.tobytes():
        return 0.0
    distance = float(np.linalg.norm(found.astype(np.float64) - expected))
    return distance or math.ulp(0.0) if math.isfinite(distance) else math.inf


def noise_statistics(size: int, *, fixed_point: bool = False) -> dict[str, Any]:
    """Compares a release of zeros with the normal distribution."""
    stddev = 1.5
    tx = dpoptax.gaussian_noise(
        noise_multiplier=stddev, batch_size=1, key=jax.random.key(0), fixed_point=fixed_point
    )
    zeros = {"a": jnp.zeros(size // 2), "b": jnp.zeros((size - size // 2) // 100 * 100)}
    zeros["b"] = zeros["b"].reshape(-1, 100)

    @jax.jit
    def release(state: Any) -> Any:
        return tx.update(dpoptax.extend.trust_clipped(zeros, 1.0), state, zeros)

    first, state = release(tx.init(zeros))
    second, _ = release(state)
    draws = [_flat(each).astype(np.float64) for each in (first, second)]
    n, scale = 2 * len(draws[0]), stddev
    if fixed_point:  # the sensitivity has an allowance for rounding, √d g
        grid = dpoptax.extend.fixed_point_grid(1.0, noise_multiplier=stddev, batch_size=1)
        scale *= 1.0 + math.sqrt(n / 2) * grid
    x = np.concatenate(draws) / scale
    errors = {  # in standard errors
        "mean": float(x.mean() * math.sqrt(n)),
        "stddev": float((x.std() - 1.0) * math.sqrt(2 * n)),
        "correlation of releases": float(np.corrcoef(*draws)[0, 1] * math.sqrt(n / 2)),
        "correlation of neighbors": float(np.corrcoef(x[1:], x[:-1])[0, 1] * math.sqrt(n)),
    }
    found = {"draws": n, "KS p": float(stats.kstest(x, "norm").pvalue)}
    passed = all(abs(value) < 5 for value in errors.values()) and found["KS p"] > 1e-4
    found |= {f"{name}, standard errors": value for name, value in errors.items()}
    return {"passed": passed, **found}


def releases_as_on_cpu(size: int) -> dict[str, Any]:
    """Compares releases in fixed point with those of the CPU, bit for bit."""
    clip, mechanism = dpoptax.l2_clip(1.0), {"noise_multiplier": 1.0, "batch_size": 64}
    grid = dpoptax.extend.fixed_point_grid(clip, **mechanism)
    total = np.random.default_rng(0).integers(-(2**20), 2**20, size, dtype=np.int32)

    def release(total: Any) -> Any:
        tx = dpoptax.gaussian_noise(**mechanism, key=jax.random.key(0), fixed_point=True)
        clipped = dpoptax.extend.trust_clipped(total, clip, grid=grid)
        return tx.update(clipped, tx.init(total), jnp.zeros(size))[0]

    return _compare(*_on_both(lambda: jax.jit(release)(jnp.asarray(total))))


def sums_as_on_cpu() -> dict[str, Any]:
    """Compares sums on a grid with those of the CPU, bit for bit.

    The gradients are exact on both: the data are small integers, and the loss uses full precision.
    No gradient is longer than C. Otherwise coefficients may differ in the last place, and other
    coefficients round to other integers.
    """
    clip = dpoptax.l2_clip(2.0**15)
    grid = dpoptax.extend.fixed_point_grid(clip, noise_multiplier=1.0, batch_size=64)
    grad_fn = dpoptax.clipped_grad(programs.linear, clip, grid=grid)
    rng = np.random.default_rng(0)
    batch = tuple(rng.integers(-8, 9, (64, 16, 32)).astype(np.float32) for _ in "xd")

    def total() -> Any:
        params = [jnp.zeros((32, 32))]
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda params, batch: grad_fn(params, batch).sum)(params, batch)

    return _compare(*_on_both(total))


def resume() -> dict[str, Any]:
    """Compares four steps with the same steps again, and resumed after two from the host."""
    problem = transformer(length=16, width=64, layers=2, vocabulary=128)
    grad_fn = dpoptax.clipped_grad(problem.loss_fn, dpoptax.l2_clip(1.0))
    noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=16, key=jax.random.key(0))
    tx, batch = optax.chain(noise, optax.adam(1e-3)), problem.make_batch(16)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(grad_fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def steps(count: int, params: Any, state: Any) -> Any:
        for _ in range(count):
            params, state = step(params, state)
        return params, state

    start = problem.params, tx.init(problem.params)
    once, again, half = steps(4, *start)[0], steps(4, *start)[0], steps(2, *start)
    keys = [isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            for x in jax.tree.leaves(half)]  # fmt: skip
    leaves, structure = jax.tree.flatten(half)
    saved = [x if key else np.asarray(x) for x, key in zip(leaves, keys, strict=True)]
    resumed = steps(2, *jax.tree.unflatten(structure, map(jnp.asarray, saved)))[0]
    found = {"again equal": _equal(once, again), "resumed equal": _equal(once, resumed)}
    return {"passed": all(found.values()), **found}


def _on_both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the results of the default device and of the CPU."""
    here = jax.device_get(function())
    with jax.default_device(jax.devices("cpu")[0]):
        return here, jax.device_get(function())


def _compare(here: Any, cpu: Any) -> dict[str, Any]:
    a, b = _flat(here).astype(np.float64), _flat(cpu).astype(np.float64)
    return {
        "passed": _equal(here, cpu),
        "entries": len(a),
        "different": int(np.sum(a != b)),
        "largest difference": float(np.max(np.abs(a - b))),
        "largest entry": float(np.max(np.abs(b))),
    }


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
