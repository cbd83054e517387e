"""Steps of LoRA's factors that depend on their product only."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._gradients.linear_map import LinearMapState, resolve
from dpoptax.extend import Sides
from experiments.text.encoder import LastProjection
from experiments.text.training import Problem

Params = dict[str, Any]
_FLOOR = 1e-6  # the smallest eigenvalue of a Gram matrix, relative to their mean


class GaugeFreeState(NamedTuple):
    """State of `gauge_free`.

    Attributes:
        inner: State of the optimizer.
        linear_map: The map of the next step, where `dpoptax.gradient_points` finds it.
    """

    inner: Any
    linear_map: LinearMapState


def gauge_free(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes the steps of LoRA's factors depend on their product A B only.

        g_A ↦ g_A (B Bᵀ)^(-1/2),   g_B ↦ (Aᵀ A)^(-1/2) g_B

    The linear map is applied before the clip, and once more to the updates of `inner`. The factors
    (A M, M⁻¹ B) give the same product for every invertible M. Their mapped gradients differ from
    those of (A, B) by a rotation, so the clip and the noise on the product are the same, and for
    M = s I so are the updates of any `inner`.

    A and B must have full rank, so B = 0 is not a possible start; see `split_start`.

    Privacy: the factors are public, because they are functions of releases. The map is applied
    before the clip, and is post-processing after it.

    Args:
        inner: Optimizer for the released gradients, including the learning rate.

    Returns:
        A transformation to place after the noise, as the last one of the chain.

    Source: compare Wang and Zhang, "PRISM: Gauge-Invariant Tangent-Space Differentially Private
    LoRA", 2026, which clips and adds noise in the tangent space of the product.
    """

    def map_of(params: Params) -> LinearMapState:
        return LinearMapState(resolve(gauge_factors(params), params), back=False)

    def init_fn(params: Params) -> GaugeFreeState:
        return GaugeFreeState(inner.init(params), map_of(params))

    def update_fn(
        updates: Params, state: GaugeFreeState, params: Params | None = None
    ) -> tuple[Params, GaugeFreeState]:
        assert params is not None
        updates, inner_state = inner.update(updates, state.inner, params)
        updates = state.linear_map.of(params).forward(updates)
        moved = optax.apply_updates(params, updates)
        return updates, GaugeFreeState(inner_state, map_of(moved))

    return optax.GradientTransformation(init_fn, update_fn)


def gauge_factors(params: Params) -> Any:
    """Returns a factor of the linear map for each parameter; it is 1 except for LoRA's A and B."""

    def visit(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return 1.0
        found = {name: visit(child) for name, child in tree.items()}
        if {"lora_a", "lora_b"} <= tree.keys():
            a, b = tree["lora_a"], tree["lora_b"]
            root, inverse = _roots(b @ b.T)
            found["lora_a"] = Sides(columns=inverse, columns_inverse=root)
            root, inverse = _roots(a.T @ a)
            found["lora_b"] = Sides(rows=inverse, rows_inverse=root)
        return found

    return visit(params)


def _roots(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the square root of a positive matrix, and its inverse."""
    values, vectors = jnp.linalg.eigh(gram)
    values = jnp.sqrt(jnp.maximum(values, _FLOOR * jnp.mean(values)))
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def split_start(
    lora: Params, frozen: Params, scale: float, key: jax.Array
) -> tuple[Params, Params]:
    """Returns factors with orthonormal A and B, and frozen weights without their product.

    The network computes the same, and neither factor is zero.

    Args:
        lora: The parameters of LoRA.
        frozen: The published weights.
        scale: Factor of the product in the network, alpha/rank.
        key: A key for the random start.
    """
    keys = iter(jax.random.split(key, 1000))

    def visit(lora: Any, frozen: Any) -> tuple[Any, Any]:
        if "lora_a" in lora:
            a, b = lora["lora_a"], lora["lora_b"]
            a = _orthonormal(next(keys), a.shape)
            b = _orthonormal(next(keys), b.shape[::-1]).T
            return {"lora_a": a, "lora_b": b}, frozen | {"kernel": frozen["kernel"] - scale * a @ b}
        parts = {name: visit(child, frozen[name]) for name, child in lora.items()}
        weights = {name: part[1] for name, part in parts.items()}
        return {name: part[0] for name, part in parts.items()}, frozen | weights

    return visit(lora, frozen)


class SplitProjection(LastProjection):
    """A `LastProjection` that computes the published features with factors of full rank.

    The collection "frozen" has a "kernel" with minus the product of the first factors.
    """

    def __call__(self, inputs: jax.Array, sums: jax.Array, used: jax.Array) -> jax.Array:
        rest = inputs @ self.get_variable("frozen", "kernel")
        return super().__call__(inputs, jnp.asarray(sums, jnp.float32) + rest, used)


def split_projection(problem: Problem, lora: Params, key: jax.Array) -> tuple[Problem, Params]:
    """Returns a problem and factors from `split_start`, for factors of a `LastProjection`."""
    assert problem.encoder is not None
    product = jnp.zeros((lora["lora_a"].shape[0], problem.width))
    factors, rest = split_start(lora, {"kernel": product}, 1.0, key)
    encoder = SplitProjection(problem.encoder.rank, width=problem.width)
    frozen = {**problem.frozen, **rest}
    return dataclasses.replace(problem, encoder=encoder, frozen=frozen), factors


def _orthonormal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jnp.linalg.qr(jax.random.normal(key, shape))[0]
