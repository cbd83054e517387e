"""Search for the example that moves a clipped sum the most."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clipped_grad.clipped_grad import clipped_grad
from dpoptax._clips.clip import Clip
from dpoptax._points.points import GradientPoints, gradient_points
from dpoptax.auditing._game import Game, leaf_projections
from dpoptax.sampling import PoissonSampler

# Magnitudes of the search: all of float32, including subnormal numbers.
_EXPONENTS = (-149, 127)
# Examples of the game: positions of a linear regression, their width, and the number of others.
_POSITIONS, _WIDTH, _OTHERS = 16, 4, 15


class WorstExample(NamedTuple):
    """Holds the result of a search.

    Attributes:
      ratio: the movement of the clipped sum over the clip's sensitivity. If it exceeds 1 by more
        than rounding, the clip's bound is broken. Infinite for a sum that is not finite.
      example: leaves shaped like those of the batch, without its leading axis.
    """

    ratio: float
    example: Any


def worst_example(
    grad_fn: Callable[..., Any],
    points: GradientPoints,
    batch: Any,
    mask: Any = None,
    *,
    seed: int = 0,
    starts: int = 28,
    steps: int = 50,
) -> WorstExample:
    """Searches for the example that moves a clipped sum the most.

        max_ξ ‖S(others ∪ {ξ}) − S(others)‖ / C,    S as `grad_fn` computes it, in floating point

    The search climbs from starts in families of data that broke earlier bounds: positions whose
    gradients cancel exactly, one group far below another, magnitudes from 1e-45 to 3e38, and nearly
    equal entries. It changes an example at random and keeps the change if the sum moves at least as
    far. Leaves of integers, such as labels and tokens, are taken from another example.

    Privacy: the result depends on the batch and is as private as the batch. A search cannot prove a
    bound; it can only break one.

    Args:
      grad_fn: from `dpoptax.clipped_grad`, without auxiliary outputs and keys.
      points: the gradient points.
      batch: examples along the leading axis of every leaf; the last one is replaced.
      mask: True for the other examples that count; all by default.
      seed: the seed of the search.
      starts: number of examples to start from; seven families take turns.
      steps: number of changes to try from each start.

    Raises:
      ValueError: the batch has no floating-point leaf to search in.

    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(0.1))
    >>> points = dpoptax.gradient_points((), jnp.zeros(2))
    >>> found = worst_example(grad_fn, points, jnp.ones((4, 2)), starts=7, steps=5)
    >>> 0.99 < found.ratio < 1.0001
    True
    """
    leaves = jax.tree.leaves(batch)
    if not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError(
            "`batch` must have a leaf of floats, which the search can change, got leaves of "
            f"{sorted({str(leaf.dtype) for leaf in leaves})}."
        )
    clipped = jax.jit(lambda batch, mask: grad_fn(points, batch, mask))
    like = jax.eval_shape(clipped, batch, np.ones(len(leaves[0]), bool))
    unit = float(like.clip.sensitivity) / (like.terms.grid or 1.0)
    total = lambda batch, mask: clipped(batch, mask).sum  # noqa: E731
    found, example = climb(total, batch, mask, seed=seed, starts=starts, steps=steps)
    return WorstExample(found / unit, example)


def searched_canary(
    transform: optax.GradientTransformation,
    clip: Clip | float,
    *,
    seed: int = 0,
    starts: int = 28,
    steps: int = 50,
) -> tuple[Game, float]:
    """Returns the game in which the attacker plants the worst example of a search.

    It is one full-batch release of a linear regression over positions, ℓ(w; x, y) = ½ Σ‖x w − y‖²
    at w = 0. The gradient is a sum of products whose terms can cancel. There are 15 other examples,
    of ordinary size, of size 6·10¹⁷, and one of NaN. `canary_gradient` tests the claimed *noise*;
    this game tests the claimed *sensitivity*. The attacker projects on the actual change of the
    sum, including changes in the summands of others.

    Args:
      transform: the chain under attack, with `batch_size=16`.
      clip: the clip under attack. A number C means `l2_clip(C)`.
      seed: the seed of the search and of the other examples.
      starts: as for `worst_example`.
      steps: as for `worst_example`.

    Returns:
      The game, and the movement over the clip's sensitivity.

    >>> import dpoptax
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=16, key=jax.random.key(0))
    >>> game, ratio = searched_canary(tx, dpoptax.l2_clip(1.0), starts=7, steps=2)
    >>> game.rows, 0.99 < ratio < 1.0001
    (16, True)
    """
    size = _OTHERS + 1
    params = {"kernel": jnp.zeros((_WIDTH, _WIDTH))}
    keys = jax.random.split(jax.random.key(seed))
    batch = tuple(jax.random.normal(key, (size, _POSITIONS, _WIDTH)) for key in keys)
    batch = tuple(x.at[:4].multiply(6e17).at[4].set(jnp.nan) for x in batch)
    grad_fn = clipped_grad(regression_loss, clip)
    points = gradient_points(transform.init(params), params)
    found = worst_example(grad_fn, points, batch, seed=seed, starts=starts, steps=steps)
    dataset = _planted(batch, found.example)

    def mean(batch: Any, mask: Any) -> Any:
        clipped = grad_fn(points, batch, mask)
        return clipped.decode(jax.tree.map(lambda x: x / size, clipped.sum))

    move = moves(mean, batch, found.example)

    def observe(update: Any, canary: Any) -> jax.Array:
        del canary  # its own contribution, without changes in the summands of others
        return leaf_projections(update, move)

    sampler = PoissonSampler(size, size, seed=0)
    return Game(transform, grad_fn, params, dataset, sampler, observe=observe), found.ratio


def regression_loss(params: Any, example: Any) -> jax.Array:
    """Returns ½ Σ‖x w − y‖²; the terms of its gradient xᵀ(x w − y) may cancel."""
    x, y = example
    return 0.5 * jnp.sum((x @ params["kernel"] - y) ** 2)


def moves(total: Callable[..., Any], batch: Any, example: Any, mask: Any = None) -> Any:
    """Returns the change of a sum by the last example of a batch, in float64.

    Args:
      total: `total(batch, mask)`, a tree of sums, compiled as in use.
      batch: examples along the leading axis of every leaf.
      example: the last example, leaves without that axis.
      mask: True for the other examples that count; all by default.
    """
    size = len(jax.tree.leaves(batch)[0])
    mask = np.ones(size, bool) if mask is None else np.array(mask)
    batch = _planted(batch, example)
    sums = []
    for last in (True, False):
        mask[-1] = last
        sums.append(jax.tree.map(lambda x: np.asarray(x, np.float64), total(batch, mask)))
    return jax.tree.map(np.subtract, *sums)


def moved(total: Callable[..., Any], batch: Any, example: Any, mask: Any = None) -> float:
    """Returns the l2 norm of `moves(...)`, or infinity if it is not finite."""
    with np.errstate(all="ignore"):
        leaves = jax.tree.leaves(moves(total, batch, example, mask))
        found = float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))
    return found if np.isfinite(found) else float("inf")


def _planted(batch: Any, example: Any) -> Any:
    return _put_last(batch, jax.tree.map(lambda x, e: np.asarray(e, x.dtype), batch, example))


@jax.jit
def _put_last(batch: Any, example: Any) -> Any:
    return jax.tree.map(lambda x, e: jnp.asarray(x).at[-1].set(e), batch, example)


FAMILIES = 7


def start(rng: np.random.Generator, shapes: Any, family: int) -> list[np.ndarray]:
    """Returns a first example of a family that broke earlier bounds, (shapes,)."""
    arrays = [rng.normal(size=shape) for shape in shapes]
    scale = 2.0 ** rng.integers(-30, 30)
    if family == 0:  # one magnitude for each array
        arrays = [a * 2.0 ** rng.integers(*_EXPONENTS) for a in arrays]
    if family in (1, 2):  # large pairs that cancel: u v^T - v u^T next to small entries
        u, v = rng.integers(1, 32, 2)
        for array, pair in zip(arrays, ((u, v), (v, -u)), strict=False):
            if array.ndim and len(array) > 2:
                array[:2] = np.reshape(pair, (2,) + (1,) * (array.ndim - 1)) * scale
                array[3:] *= family - 1
    if family == 3:  # positions far apart in magnitude, with opposite orders in two arrays
        spread = rng.integers(-60, 60, size=max(a.shape[0] if a.ndim else 1 for a in arrays))
        for sign, array in zip((1, -1), arrays, strict=False):
            if array.ndim:
                powers = 2.0 ** (sign * spread[: len(array)])
                array *= powers.reshape(-1, *(1,) * (array.ndim - 1))
    if family == 4:  # equal and nearly equal entries
        arrays = [np.ones_like(a) * scale * (1 + 2.0**-20 * (rng.random(a.shape) < 0.1) * a)
                  for a in arrays]  # fmt: skip
    if family == 5:  # last axes of very different size: groups, channels
        for sign, array in zip((1, -1), arrays, strict=False):
            if array.ndim:
                array *= 2.0 ** (sign * rng.integers(-80, 80, size=array.shape[-1]))
    return arrays


def _mutate(rng: np.random.Generator, arrays: list[np.ndarray]) -> list[np.ndarray]:
    arrays = [np.array(a) for a in arrays]
    array = arrays[rng.integers(len(arrays))].reshape(-1)
    if not array.size:
        return arrays
    picked = rng.random(array.size) < rng.choice([1.5 / array.size, 0.2, 1.0])
    picked[rng.integers(array.size)] = True
    kind = rng.integers(6)
    if kind == 0:
        array[picked] *= 2.0 ** rng.integers(-12, 13)
    elif kind == 1:
        array[picked] *= 1 + rng.choice([1e-7, 1e-4, 0.1, 1.0]) * rng.normal(size=picked.sum())
    elif kind == 2:
        array[picked] *= -1
    elif kind == 3:
        array[picked] = rng.choice([0.0, 1.0, 2.0**-126, 1e-45, 3e38, 1e-19, 1e17])
    elif kind == 4:
        array[picked] = -array[rng.integers(array.size)]
    else:
        array[picked] += rng.choice([1e-6, 1e-2, 1.0]) * rng.normal(size=picked.sum())
    return [a.reshape(b.shape) for a, b in zip(arrays, arrays, strict=True)]


def climb(
    total: Callable[..., Any], batch: Any, mask: Any = None, *, seed: int, starts: int, steps: int
) -> tuple[float, Any]:
    """Returns the largest movement found by hill climbing from starts in the families.

    Args:
      total: `total(batch, mask)`.
      batch: the batch; the example goes into its last place.
      mask: True for the other examples that count.
      seed: the seed of the search.
      starts: number of examples to start from.
      steps: number of changes to try from each start.

    Returns:
      The largest movement, and its example.
    """
    rng = np.random.default_rng(seed)
    treedef: Any
    leaves, treedef = jax.tree.flatten(batch)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    others = len(leaves[0]) - 1
    best = -1.0, None
    with np.errstate(all="ignore"):
        for i in range(starts):
            arrays = start(rng, [leaves[j].shape[1:] for j in floats], i % FAMILIES)
            rest = leaves
            if len(floats) < len(leaves):
                other = int(rng.integers(max(1, others)))
                rest = [leaf[other] for leaf in leaves]

            def example(arrays: Any, rest: Any = rest) -> Any:
                given = dict(zip(floats, arrays, strict=True))
                return treedef.unflatten([given.get(j, x) for j, x in enumerate(rest)])

            value = moved(total, batch, example(arrays), mask)
            for _ in range(steps):
                changed = _mutate(rng, arrays)
                found = moved(total, batch, example(changed), mask)
                if found >= value:
                    arrays, value = changed, found
            if value > best[0]:
                best = value, example(arrays)
    return best
