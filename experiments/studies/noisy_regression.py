"""Runs gradient descent on a linear regression with noise (DiSK, Fig. 6(a))."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._points.points import gradient_points
from dpoptax.filters._disk import disk
from dpoptax.filters._low_pass import low_pass
from experiments.studies.rows import Findings, Row, over, pick, verdict

NOISES = (0.1, 0.3, 1.0)
"""Standard deviations of the noise in each coordinate of a gradient."""
RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Learning rates, the same for every method."""


def regression_methods(kappa: float = 0.3) -> dict[str, optax.GradientTransformation]:
    """Returns noisy descent, a low-pass filter of gain κ, and DiSK with the same gain."""
    return {
        "noisy GD": optax.identity(),
        "low-pass": low_pass([kappa], [kappa - 1.0], start="steady"),
        "Kalman": disk(kappa, 1.0),
    }


def noisy_regression(
    noises: Sequence[float] = NOISES,
    *,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    seeds: int = 20,
) -> np.ndarray:
    """Returns the excess loss of noisy descent on F(x) = ‖A x − y‖²/(2n), x of 20 numbers.

    A has 200 rows of independent normal numbers, so the curvatures are about 1. In each of 300
    steps, each gradient at the method's points gets independent noise N(0, level² I), as after the
    noise stage of a private run without clipping. All methods see the same noise.

    Args:
      noises: standard deviations of the noise.
      methods: transforms by name; `regression_methods()` by default.
      seeds: number of runs, each with separate noise.

    Returns:
      F(x) − F(x*) averaged over the last tenth of the steps, for each of the methods, noises,
      `RATES` and seeds; infinite if a run diverged.

    Source: DiSK, Fig. 6(a).
    """
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(200, 20)), jnp.float32)
    curvature = rows.T @ rows / len(rows)
    start = jnp.asarray(rng.normal(size=20), jnp.float32)  # x* is the origin

    def run(method: optax.GradientTransformation, level: Any, rate: Any, seed: Any) -> jax.Array:
        def step(carry: Any, key: Any) -> Any:
            x, state = carry
            points = gradient_points(state, x)
            gradient = sum(
                w * (curvature @ p) for w, p in zip(points.weights, points.points, strict=True)
            )
            gradient += level * jax.random.normal(key, x.shape)
            updates, state = method.update(gradient, state, x)
            x = x - rate * updates
            return (x, state), 0.5 * x @ curvature @ x

        keys = jax.random.split(jax.random.key(seed), 300)
        _, losses = jax.lax.scan(step, (start, method.init(start)), keys)
        tail = jnp.mean(losses[-30:])
        return jnp.where(jnp.isfinite(tail), tail, jnp.inf)

    grid = (jnp.asarray(noises), jnp.asarray(RATES), jnp.arange(seeds))
    results = []
    for method in (regression_methods() if methods is None else methods).values():
        over_seeds = jax.vmap(lambda *a, m=method: run(m, *a), (None, None, 0))
        over_rates = jax.vmap(over_seeds, (None, 0, None))
        results.append(jax.jit(jax.vmap(over_rates, (0, None, None)))(*grid))
    return np.stack(results)


def rows(seeds: int) -> list[Row]:
    """Computes the losses at several learning rates, with 4 · `seeds` seeds."""
    excess_loss = noisy_regression(seeds=4 * seeds)
    return [
        {
            "method": method,
            "noise": level,
            "learning_rate": rate,
            "seed": seed,
            "excess_loss": excess_loss[i, j, k, seed],
        }
        for i, method in enumerate(regression_methods())
        for j, level in enumerate(NOISES)
        for k, rate in enumerate(RATES)
        for seed in range(4 * seeds)
    ]


def findings(rows: list[Row]) -> Findings:
    """Checks that the Kalman filter has the lowest loss at every noise level."""
    levels, names = np.unique(pick(rows, "noise")), ("Kalman", "noisy GD", "low-pass")
    found: Findings = []
    largest = pick(rows, "learning_rate").max()
    for label, loss in (
        (
            f"at one learning rate, {largest:g}",
            lambda method, noise: pick(
                rows, "excess_loss", method=method, noise=noise, learning_rate=largest
            ).mean(),
        ),
        (
            "at each one's own best learning rate",
            lambda method, noise: (
                over(rows, "learning_rate", "excess_loss", method=method, noise=noise)[1]
                .mean(0)
                .min()
            ),
        ),
    ):
        losses = np.array([[loss(name, noise) for noise in levels] for name in names])
        ratios = losses[1:] / losses[0]
        found.append(
            (
                f"DiSK has the lowest loss at every noise, {label}",
                "; ".join(
                    f"{name}'s is {_between(ratio)} times as high"
                    for name, ratio in zip(names[1:], ratios, strict=True)
                ),
                verdict(ratios > 1),
            )
        )
    return found


def _between(values: np.ndarray) -> str:
    ends = [f"{end:.2f}" for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))
