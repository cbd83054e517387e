"""Scaling before the clip by the second moment of earlier releases."""

import dataclasses
import functools
import math
import operator
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from dpoptax._gradients.clip.clipped_sum import check_released
from dpoptax._gradients.linear_map import Diagonal, LinearMapState
from dpoptax._support.serialization import SerializableState, register
from dpoptax._support.tree import PyTree, check_decays, check_known, check_stddev
from dpoptax.contrib._singular_values import is_kernel

Each: TypeAlias = Literal["entry", "side", "leaf"]
# Second moments of one parameter: per entry, per row and per column, or over the whole leaf.
_Moments: TypeAlias = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleThenPrivatizeState(SerializableState):
    """State of `scale_then_privatize`.

    Attributes:
      count: the number of updates so far, int32.
      moments: the running second moments, float32, one tuple per parameter.
      mean: the sum of the releases since the scales last changed; () if they change in every step.
      linear_map: the map of the next step, stored where `gradient_points` finds it.
    """

    count: jax.Array
    moments: PyTree
    mean: PyTree
    linear_map: LinearMapState


def scale_then_privatize(
    *,
    each: Each = "side",
    b2: float = 0.99,
    eps: float = 0.1,
    power: float = 0.5,
    stddev: float = 0.0,
    every: int = 1,
    normalized: bool = True,
) -> optax.GradientTransformation:
    """Scales gradients before clipping by the second moment of earlier releases.

        v_t = b2 v_{t−1} + (1 − b2) g̃_t²,   v̂_t = v_t/(1 − b2^t)
        d = v̂_t^power + eps · rms(v̂_t^power),   s = rms(d)/d
        g̃_{t+1} = (Σ_ξ clip(s ⊙ g(ξ)) + σ C N(0, I)) / (B s)

    g̃ are the releases, which pass through unchanged. Follow it with an optimizer; Adam suits the
    default `power`. s has one number for each entry of a parameter ("entry"), for each row and each
    column of a kernel ("side"), or for each leaf ("leaf", which equalizes the signal of layers).
    "side" uses v̂_ij = R_i C_j / mean R, with R and C the means over columns and rows, as in
    Adafactor. rms is over all entries of all parameters. Before the first update s is 1.

    With s = rms(d)/d, the clipping bound keeps its units and the noise its total power Σ(σ C/(s
    B))²: less where gradients are small, more where they are large. `normalized=False` uses
    s = 1/d. "side" and "leaf" support ghost clipping; "entry" needs the per-example gradients of
    all kernels, with their memory.

    Input and output: privatized mean gradients. Privacy: the guarantee is the same as without
    scales, because the clip follows them and they depend only on earlier releases. Memory: one
    vector per side of a kernel for "side"; one copy of the parameters and one of the scales for
    "entry"; one more copy if `every` is above 1.

    Args:
      each: the unit that has its own scale.
      b2: decay of the second moment, in [0, 1).
      eps: the floor of d, relative to its rms, at least 1e-4. Large values flatten the scales. For
        "side" it is a floor of the factors of rows, of columns and of the whole kernel. A scale is
        at most about 1/eps, or 1/eps³ for "side".
      power: 0.5 equalizes the size of gradients, like Adam's denominator. 0.25 minimizes the total
        noise for a given fraction of clipped examples (AdaCliP).
      stddev: the absolute standard deviation of the noise in a mean without scales; see
        `dpoptax.extend.noise_stddev`. Its square over s² is subtracted from g̃². With 0, the noise,
        which is proportional to d, slows the change of the scales. If nearly all of g̃ is noise,
        even averaged over 1/(1 − b2) steps, the difference is mostly error.
      every: the number of steps between changes of the scales, which then use the square of the
        mean release since the last change (the delay of DP²). This divides the noise power by
        `every`.
      normalized: whether to multiply s by the rms of d.

    Returns:
      An `optax.GradientTransformation` to place after the noise stage.

    Raises:
      ValueError: a number is out of range, or `each` is unknown.
      TypeError: at `update`, this stage precedes the noise stage and gets a private `ClippedSum`.

    Source: Ganesh, McMahan and Thakurta, "On Design Principles for Private Adaptive Optimizers",
    2025, Algorithm 8, for every entry, with `normalized=False`, `power=0.5` and an absolute eps; Li
    et al., "Differentially Private Adaptive Optimization with Delayed Preconditioners", 2023, for
    `every`; Shazeer and Stern, "Adafactor", 2018, for the factors; Pichapati et al., "AdaCliP",
    2019, for `power`. The relative floor, the normalization and the noise correction are specific
    to dpoptax.

    >>> import dpoptax
    >>> params = {"w": jnp.ones((2, 2))}
    >>> tx = scale_then_privatize(each="entry", eps=1e-3)
    >>> noisy = {"w": jnp.array([[1.0, 2.0], [4.0, 4.0]])}
    >>> _, state = tx.update(noisy, tx.init(params), params)
    >>> dpoptax.gradient_points(state, params).linear_map.forward(noisy)["w"].round(1)
    Array([[3., 3.],
           [3., 3.]], dtype=float32)
    """
    _check(each, b2, eps, power, stddev, every)
    keep = functools.partial(_moments, each=each)

    def init_fn(params: PyTree) -> ScaleThenPrivatizeState:
        register()
        moments = jax.tree.map(lambda p: keep(jnp.zeros(p.shape, jnp.float32)), params)
        mean = () if every == 1 else optax.tree.zeros_like(params, dtype=jnp.float32)
        ones = jax.tree.map(lambda p, m: _ones(m, p.ndim), params, moments)
        count = jnp.zeros([], jnp.int32)
        return ScaleThenPrivatizeState(count, moments, mean, LinearMapState(ones))

    def update_fn(
        updates: PyTree, state: ScaleThenPrivatizeState, params: PyTree = None
    ) -> tuple[PyTree, ScaleThenPrivatizeState]:
        del params
        check_released("scale_then_privatize", updates)
        count = optax.safe_increment(state.count)
        mean = optax.tree.cast(updates, jnp.float32)
        if every > 1:
            mean = optax.tree.add(state.mean, mean)
        due = count % every == 0
        factors = state.linear_map.factors

        def moved(g: jax.Array, before: _Moments, factor: Diagonal) -> _Moments:
            # The noise of a release is stddev/s. Averaging `every` releases divides its variance.
            scale = functools.reduce(operator.mul, factor.scales)
            square = jnp.square(g / every) - (stddev / scale) ** 2 / every
            return tuple(
                jnp.where(due, b2 * old + (1.0 - b2) * new, old)
                for old, new in zip(before, keep(square), strict=True)
            )

        moments = jax.tree.map(moved, mean, state.moments, factors)
        corrected = optax.tree.bias_correction(moments, b2, jnp.maximum(count // every, 1))
        found = _scales(corrected, mean, eps=eps, power=power, normalized=normalized)
        factors = optax.tree.where(due, found, factors)
        mean = () if every == 1 else jax.tree.map(lambda x: jnp.where(due, 0.0, x), mean)
        return updates, ScaleThenPrivatizeState(count, moments, mean, LinearMapState(factors))

    return optax.GradientTransformation(init_fn, update_fn)


def _check(each: str, b2: float, eps: float, power: float, stddev: float, every: int) -> None:
    if each not in ("entry", "side", "leaf"):
        raise ValueError(f"`each` must be 'entry', 'side' or 'leaf', got {each!r}.")
    check_known(eps=eps, power=power, every=every)
    check_decays(b2=b2)
    check_stddev(stddev)
    if not (math.isfinite(eps) and eps >= 1e-4):
        raise ValueError(f"`eps` must be finite and at least 1e-4, to bound the scales, got {eps}.")
    if not 0.0 < power <= 1.0:
        raise ValueError(f"`power` must be in (0, 1], got {power}.")
    if every < 1:
        raise ValueError(f"`every` must be at least 1, got {every}.")


def _moments(square: jax.Array, *, each: Each) -> _Moments:
    """Returns the means of a parameter's squared gradient, with axes of size 1."""
    if each == "entry" or (each == "side" and not is_kernel(square)):
        return (square,)
    if each == "leaf":
        return (jnp.mean(square, keepdims=True),)
    rows = jnp.mean(square, axis=-1, keepdims=True)
    columns = jnp.mean(square, axis=tuple(range(square.ndim - 1)), keepdims=True)
    return rows, columns


def _ones(moments: _Moments, rank: int) -> Diagonal:
    """Returns scales of 1 in the shapes of `_scales`."""
    level = [jnp.ones((1,) * rank, jnp.float32)] * (len(moments) > 1)
    return Diagonal((*map(jnp.ones_like, moments), *level))


def _scales(moments: PyTree, like: PyTree, *, eps: float, power: float, normalized: bool) -> PyTree:
    """Returns the scales of all parameters from their second moments."""
    leaves = jax.tree.leaves(like)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(like)
    given: list[_Moments] = structure.flatten_up_to(moments)
    sizes = [leaf.size for leaf in leaves]

    def rms(denominators: list[_Moments]) -> jax.Array:
        """Returns the rms of products of arrays that vary along different axes."""
        squares = [
            size * math.prod(jnp.mean(jnp.square(x)) for x in factors)
            for size, factors in zip(sizes, denominators, strict=True)
        ]
        return jnp.sqrt(sum(squares, jnp.zeros([])) / max(sum(sizes), 1))

    typical = rms([_denominators(m, power, 0.0, jnp.zeros([])) for m in given])
    denominators = [_denominators(m, power, eps, typical) for m in given]
    whole = rms(denominators) if normalized else jnp.ones([])
    # Without a usable moment, as before any signal or after an overflow, all scales are 1.
    usable = jnp.isfinite(whole) & jnp.isfinite(typical) & (typical > 0)
    found = [
        Diagonal(tuple(jnp.where(usable, x, 1.0) for x in (*(1.0 / y for y in rest), whole / last)))
        for *rest, last in denominators
    ]
    return jax.tree.unflatten(structure, found)


def _denominators(
    moments: _Moments, power: float, eps: float, typical: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns arrays that broadcast to a parameter and whose product is d."""
    if len(moments) == 1:
        return (jnp.maximum(moments[0], 0.0) ** power + eps * typical,)
    # R_i C_j / mean R = level · (R_i / mean R) · (C_j / mean C), as both means are the level.
    level = jnp.maximum(jnp.mean(moments[0], keepdims=True), 0.0)
    sides = []
    for moment in moments:
        moment = jnp.maximum(moment, 0.0)  # the subtracted noise may exceed the moment
        mean = jnp.mean(moment)
        shape = jnp.where(mean > 0, moment / jnp.where(mean > 0, mean, 1.0), 1.0)
        sides.append(shape**power + eps)
    return (*sides, level**power + eps * typical)
