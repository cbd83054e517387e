"""A search for the example that moves a clipped sum the most: the enemy of the bound."""

import jax
import jax.numpy as jnp
import numpy as np

# What magnitudes an enemy tries: all of float32, with its subnormal numbers.
_EXPONENTS = (-149, 127)


def moved(total, batch, example, mask=None):
    """How far the last example of a batch moves a sum, in l2 norm, computed in float64.

    Args:
      total: `total(batch, mask)`, a tree of sums; compiled, as its user would have it.
      batch: examples along the leading axis of every leaf.
      example: what is put in the last place, leaves without that axis.
      mask: which of the others count; all by default.
    """
    size = len(jax.tree.leaves(batch)[0])
    mask = np.ones(size, bool) if mask is None else np.array(mask)
    batch = jax.tree.map(lambda x, e: x.at[-1].set(jnp.asarray(e, x.dtype)), batch, example)
    sums = []
    for last in (True, False):
        mask[-1] = last
        sums.append([np.asarray(x, np.float64) for x in jax.tree.leaves(total(batch, mask))])
    for leaf in sums[0] + sums[1]:
        assert np.isfinite(leaf).all()
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*sums, strict=True))))


FAMILIES = 7


def start(rng, shapes, family):
    """A first example, one array a shape: of a family in which bounds were seen to break."""
    arrays = [rng.normal(size=shape) for shape in shapes]
    scale = 2.0 ** rng.integers(-30, 30)
    if family == 0:  # one magnitude for each array
        arrays = [a * 2.0 ** rng.integers(*_EXPONENTS) for a in arrays]
    if family in (1, 2):  # large pairs that cancel: u v^T - v u^T beside something small
        u, v = rng.integers(1, 32, 2)
        for array, pair in zip(arrays, ((u, v), (v, -u)), strict=False):
            if array.ndim and len(array) > 2:
                array[:2] = np.reshape(pair, (2,) + (1,) * (array.ndim - 1)) * scale
                array[3:] *= family - 1
    if family == 3:  # positions far apart in magnitude, against each other
        spread = rng.integers(-60, 60, size=max(a.shape[0] if a.ndim else 1 for a in arrays))
        for sign, array in zip((1, -1), arrays, strict=False):
            if array.ndim:
                powers = 2.0 ** (sign * spread[: len(array)])
                array *= powers.reshape(-1, *(1,) * (array.ndim - 1))
    if family == 4:  # equal entries, and all but equal ones
        arrays = [np.ones_like(a) * scale * (1 + 2.0**-20 * (rng.random(a.shape) < 0.1) * a)
                  for a in arrays]  # fmt: skip
    if family == 5:  # last axes far apart: groups, channels
        for sign, array in zip((1, -1), arrays, strict=False):
            if array.ndim:
                array *= 2.0 ** (sign * rng.integers(-80, 80, size=array.shape[-1]))
    return arrays


def _mutate(rng, arrays):
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


def worst(total, batch, make, shapes, *, seed, starts, steps, mask=None):
    """The largest move that starts from the families and climbing hills from them found.

    Args:
      total: `total(batch, mask)`.
      batch: the batch; the example goes into its last place.
      make: maps the arrays that are searched over, of `shapes`, to an example.
      shapes: their shapes.
      seed: of the search.
      starts: how many examples to start from.
      steps: how many mutations to try from each.
      mask: which of the others count.

    Returns:
      The largest move, and its example.
    """
    rng = np.random.default_rng(seed)
    best = 0.0, None
    with np.errstate(all="ignore"):
        for i in range(starts):
            arrays = start(rng, shapes, i % FAMILIES)
            value = moved(total, batch, make(*arrays), mask)
            for _ in range(steps):
                changed = _mutate(rng, arrays)
                found = moved(total, batch, make(*changed), mask)
                if found >= value:
                    arrays, value = changed, found
            if value > best[0]:
                best = value, make(*arrays)
    return best
