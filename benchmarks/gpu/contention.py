"""Tests that the indices of masked examples do not change the order of additions in others.

On a GPU, all examples share the kernel of a scatter. Updates that meet at one entry slow each other
down, so they change the order in which those of other examples arrive. Terms of about 1e4 that
cancel make each order visible.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import dpoptax

BOUND, ROWS, REPEATS = 0.3, 64, 20


def _segment_sum(x: Any, places: Any) -> Any:
    return jax.ops.segment_sum(x, places, ROWS)


def _gather(x: Any, places: Any) -> Any:
    """Its derivative adds the cotangents of equal places."""
    return x[:ROWS][places] * jnp.sign(x)


def _pooling(x: Any, places: Any) -> Any:
    """The place of each maximum follows `places`, and windows overlap."""
    order = jnp.argsort(places, stable=True)
    return lax.reduce_window(x[order], -jnp.inf, lax.max, (9, 1), (2, 1), "SAME")


OPERATIONS = {"segment sum": _segment_sum, "gather": _gather, "pooling": _pooling}


def measure(small: bool) -> dict[str, Any]:
    """Returns how far masked indices move the sum, and a sum without dpoptax, in units of C."""
    examples, length, width = (8, 64, 4) if small else (64, 4096, 32)
    used = np.arange(examples) % 4 == 0  # most examples are masked
    rng = np.random.default_rng(0)
    x = 1e4 * rng.normal(size=(examples, length, width)).astype(np.float32)
    x[:, 1::2] = -x[:, ::2] + rng.normal(size=x[:, ::2].shape).astype(np.float32) * 1e-4
    found: dict[str, Any] = {"passed": True}
    for name, operation in OPERATIONS.items():
        private, plain = _sums(operation, width, used)
        settings = list(_settings(rng, used, length))
        moved = largest_move(lambda i, total=private: total(x, i), settings) / BOUND
        found |= {f"{name} moves / C": moved, "passed": found["passed"] and moved == 0.0}
        moved = largest_move(lambda i, total=plain: total(x, i), settings) / BOUND
        found[f"{name} without dpoptax moves / C"] = moved
    return found


def largest_move(total: Callable[[Any], Any], settings: list[Any]) -> float:
    """Returns the largest distance of repeated sums from the first one."""
    expected = np.asarray(total(settings[0]), np.float64)
    sums = (np.asarray(total(each), np.float64) for each in settings for _ in range(REPEATS))
    return max(float(np.linalg.norm(each - expected)) for each in sums)


def _sums(operation: Callable[..., Any], width: int, used: np.ndarray) -> tuple[Any, Any]:
    """Returns the clipped sum of a loss, and the plain sum of its gradients scaled to C."""

    def loss(params: Any, example: Any) -> Any:
        x, places = example
        return jnp.sum(operation(x * params, places))

    params = jnp.ones(width)
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.l2_clip(BOUND))

    def plain(x: Any, places: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0))(params, (x, places))
        norms = jnp.linalg.norm(grads, axis=1, keepdims=True)
        return jnp.sum(jnp.where(used[:, None], BOUND * grads / norms, 0.0), axis=0)

    return jax.jit(lambda x, places: grad_fn(params, (x, places), used).sum), jax.jit(plain)


def _settings(rng: np.random.Generator, used: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Yields indices that differ in masked examples only, from no to much contention."""
    places = rng.integers(0, ROWS, (len(used), length))
    for masked in (np.arange(length) % ROWS, 0, ROWS - 1, rng.integers(0, 2, length), places[0]):
        yield np.where(used[:, None], places, masked).astype(np.int32)
