"""Gaussian noise on a clipped sum, and the ledger of what was released: the privacy boundary."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax import _fixed_point, _random
from dpoptax._clipping import Clip, ClippedSum, check_clip, clip_per_example
from dpoptax._points import is_masked
from dpoptax._sharding import out_sharding

# Leaves of at most this many entries may be drawn in a loop with others of their shape.
_SMALL = 2**16


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What one noisy release is, for the accountant. Static and hashable.

    Attributes:
      noise_multiplier: σ, the noise's standard deviation over the sensitivity of the sum.
      batch_size: B, the expected number of examples in a sum.
      unproven: why no (ε, δ) may be stated for it; `None` where one may.
      strategy: how the noise is correlated over the releases, a `dpoptax.matrix.Strategy`; `None`
        where it is independent.
    """

    noise_multiplier: float
    batch_size: float
    unproven: str | None = None
    strategy: Any = None


class Ledger(NamedTuple):
    """The releases that an optimizer's state accounts for, as Python values.

    Attributes:
      mechanism: the `Mechanism` of each release.
      releases: how many there were.
    """

    mechanism: Mechanism
    releases: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GaussianNoiseState:
    """State of `gaussian_noise`, and the ledger of its releases.

    Attributes:
      count: the number of noisy releases so far, int32.
      key: the typed key that every step's key is folded from.
      mechanism: what a release is. Static.
    """

    count: jax.Array
    key: jax.Array
    mechanism: Mechanism = dataclasses.field(metadata={"static": True})


def gaussian_noise(
    *,
    noise_multiplier: float,
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
) -> optax.GradientTransformation:
    """Adds Gaussian noise to a `ClippedSum` and divides by the expected batch size.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B

    with σ = `noise_multiplier`, C the sensitivity that the `ClippedSum` carries and B =
    `batch_size`. Input: a sum. Output: a mean, in the dtype of `params` where `update` gets them
    and in the sum's otherwise. The noise of step t is drawn with `fold_in(key, t)`, in float32 at
    least.

    Privacy: each update is one release of the Gaussian mechanism with noise multiplier σ, for
    adding or removing one example; the state counts the releases, and
    `dpoptax.accounting.epsilon_spent` turns the state and the sampler into ε. Everything behind
    this stage in a chain is post-processing.

    That is so for real numbers. A float32 normal has only 2²³ values, and the last bits of sum plus
    noise tell which sum they were added to: to who sees every bit of a release, or of parameters
    that were made of it, the noise is no protection (Mironov 2012). `fixed_point` answers that
    threat. Sum and noise become whole multiples of a public power of two g, are added as integers,
    and the noise is the sum of four draws, so that all sums have the same possible releases. The
    sum is rounded before the noise, and the noise scaled up for it: σ(C + √d g), d the number of
    parameters, with g at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC. It draws four normals where one
    does. It answers neither who learns the key nor who times the step, and it takes the clipped
    sum as computed: the rounding of a float32 sum over a batch can move it by more than C, by a
    relative 1e-5 or so, which no option here accounts for.

    Args:
      noise_multiplier: σ, relative to the clip bound; 0 for no noise and ε = ∞.
      batch_size: B, the expected number of examples, a public number. Never the realised one,
        which is private under Poisson sampling.
      key: a key from `jax.random.key`, or from `dpoptax.random_key_from_os`. Whoever knows it can
        subtract the noise.
      fixed_point: whether the release is safe to show with all its bits; see above.

    Returns:
      An `optax.GradientTransformation` whose `update` takes a `ClippedSum` and nothing else.

    Raises:
      ValueError: a negative or non-finite multiplier, a batch size that is not positive.
      TypeError: a traced multiplier or batch size, or a key that is none; at `update`, gradients
        that are not a `ClippedSum`.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1. For the
    attack, Mironov, "On significance of the least significant bits for differential privacy", 2012;
    for the sum of draws, Holohan and Braghin, "Secure random sampling in differential privacy",
    2021.

    >>> import jax, jax.numpy as jnp
    >>> tx = gaussian_noise(noise_multiplier=1.0, batch_size=32, key=jax.random.key(0))
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> ledgers(state)[0].releases
    0
    """
    mechanism = Mechanism(*check_mechanism(noise_multiplier, batch_size))
    key = check_key(key)
    release = _release_in_fixed_point if fixed_point else _release

    def init_fn(params):
        del params
        return GaussianNoiseState(jnp.zeros([], jnp.int32), copy_key(key), mechanism)

    def update_fn(updates, state, params=None):
        clipped = check_clipped_sum(updates)
        mechanism = state.mechanism
        step_key = jax.random.fold_in(state.key, state.count)
        noisy = draw_once(lambda: release(clipped, mechanism, step_key), clipped.sum, state.count)
        mean = jax.tree.map(lambda total: total / mechanism.batch_size, noisy)
        mean = clipped.clip.decode(mean, clipped.reference)
        if params is not None:
            mean = jax.tree.map(lambda m, p: m.astype(p.dtype), mean, params)
        count = optax.safe_increment(state.count)
        return mean, dataclasses.replace(state, count=count)

    return optax.GradientTransformation(init_fn, update_fn)


def clip_and_noise(
    clip: Clip,
    *,
    noise_multiplier: float,
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
) -> optax.GradientTransformation:
    """Clips per-example gradients, sums them and adds noise: DP-SGD's stage in plain optax form.

        release_t = (Σ_i clip(g_i) + σ C N(0, I)) / B,   for leaves (examples, …)

    The chain of `clip_per_example` and `gaussian_noise`; see there for shapes, units, privacy and
    errors. It needs per-example gradients, with their memory; `clipped_grad` does without.

    Args:
      clip: the geometry, such as `l2_clip(1.0)`.
      noise_multiplier: σ, relative to the clip bound.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.
      fixed_point: whether the release is safe to show with all its bits; see `gaussian_noise`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> clip = dpoptax.l2_clip(1.0)
    >>> tx = clip_and_noise(clip, noise_multiplier=0.0, batch_size=2, key=jax.random.key(0))
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> mean, _ = tx.update(grads, tx.init({"w": jnp.zeros(2)}))
    >>> mean["w"]
    Array([0.45..., 0.6...], dtype=float32)
    """
    return optax.chain(
        clip_per_example(check_clip(clip)),
        gaussian_noise(
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            key=key,
            fixed_point=fixed_point,
        ),
    )


def release_stddev(clip: Clip, *, noise_multiplier: float, batch_size: float) -> float:
    """The standard deviation of the noise in each coordinate of a released mean: σ C / B.

    What methods that know the noise ask for, such as `dpoptax.adam_bc`: absolute, in the units of
    the gradient. A public number.

    Args:
      clip: the geometry; C is its sensitivity.
      noise_multiplier: σ.
      batch_size: B.

    Raises:
      ValueError: a number outside its range, or a geometry that decodes the mean, as its noise is
        not the same in every step and coordinate.

    >>> import dpoptax
    >>> release_stddev(dpoptax.l2_clip(0.5), noise_multiplier=2.0, batch_size=100)
    0.01
    """
    if check_clip(clip).encodes:
        raise ValueError(
            f"clip={clip}: the noisy mean is decoded, so its noise has no single standard deviation"
        )
    noise_multiplier, batch_size = check_mechanism(noise_multiplier, batch_size)
    return noise_multiplier * clip.sensitivity / batch_size


def ledgers(opt_state: Any) -> tuple[Ledger, ...]:
    """Returns the ledger of every noise stage in an optimizer's state, in tree order.

    Reads the counts from the device. An empty tuple means that nothing in the state adds noise.

    Args:
      opt_state: an optimizer's state, or any pytree around it, such as a restored checkpoint.

    Raises:
      ValueError: a count that is not a scalar, as in a state that was stacked by `vmap`.
    """
    states = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_ledger) if is_ledger(leaf)]
    for state in states:
        if jnp.shape(state.count) != ():
            raise ValueError(
                f"a ledger's count has shape {jnp.shape(state.count)}: take the state of one run"
            )
    return tuple(Ledger(state.mechanism, int(state.count)) for state in states)


def draw_once(draw: Callable[[], Any], like: Any, count: jax.Array) -> Any:
    """Returns `draw()`, noise or noisy sums of the shapes of `like`, drawn once for all readers.

    On CPU, XLA fuses noise into whatever reads it, and where two do, such as the output of a filter
    and its buffer, into each: the draw is made twice and its parts go through memory. It fuses
    nothing across a branch, so here is one. It is always taken, as no count is negative.
    """
    if not isinstance(count, jax.core.Tracer):  # each operation by itself: nothing is fused
        return draw()
    likes, treedef = jax.tree.flatten(like)
    groups = _alike(likes)  # every array that leaves the branch takes time to compile

    def stacked(tree):
        leaves = jax.tree.leaves(tree)
        return [jnp.stack([leaves[i] for i in indices]) for indices in groups]

    def nothing():
        zeros = lambda x, drawn: jnp.zeros_like(x, drawn.dtype)  # noqa: E731
        return stacked(jax.tree.map(zeros, like, jax.eval_shape(draw)))

    def branch():
        leaves = list(likes)
        stacks = jax.lax.cond(count >= 0, lambda: stacked(draw()), nothing)
        for indices, stack in zip(groups, stacks, strict=True):
            for i, leaf in zip(indices, stack, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(treedef, leaves)

    return jax.lax.platform_dependent(cpu=branch, default=draw)


def _release(clipped, mechanism, key):
    stddev = mechanism.noise_multiplier * clipped.clip.sensitivity
    return add_noise(clipped.sum, stddev, key)


def _release_in_fixed_point(clipped, mechanism, key):
    sigma, sensitivity = mechanism.noise_multiplier, clipped.clip.sensitivity
    if sigma == 0.0:
        return clipped.sum
    step = _fixed_point.grid(sensitivity, sigma, mechanism.batch_size)
    stddev = sigma * _fixed_point.sensitivity_on_grid(clipped.sum, sensitivity, step)
    return _fixed_point.add_noise(clipped.sum, stddev, key, step)


def is_ledger(x: Any) -> bool:
    """Whether `x` is the state of a noise stage."""
    return isinstance(getattr(x, "mechanism", None), Mechanism)


def add_noise(tree: Any, stddev: float, key: jax.Array) -> Any:
    """Returns tree + stddev · N(0, I), a key for every leaf; nothing is drawn at stddev 0."""
    if stddev == 0.0:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = list(leaves)
    for indices in _alike(leaves):
        leaf = leaves[indices[0]]
        dtype, sharding = jnp.promote_types(leaf.dtype, jnp.float32), out_sharding(leaf)
        if len(indices) == 1:
            drawn = _random.normal(keys[indices[0]], leaf.shape, dtype, out_sharding=sharding)
            noisy[indices[0]] = leaf + stddev * drawn
            continue
        draw = lambda key, leaf=leaf, dtype=dtype: _random.normal(key, leaf.shape, dtype)  # noqa: E731
        drawn = jax.lax.map(draw, keys[np.array(indices)])
        total = jnp.stack([leaves[i] for i in indices]) + stddev * drawn
        for i, part in zip(indices, total, strict=True):
            noisy[i] = part
    return jax.tree.unflatten(treedef, noisy)


def _alike(leaves: list[jax.Array]) -> list[list[int]]:
    """Indices of leaves to draw in one loop: each draw that is written out takes long to compile.

    Large leaves and split ones are drawn alone: their noise is added where it is made.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        together = leaf.size <= _SMALL and out_sharding(leaf) is None
        groups.setdefault((leaf.shape, leaf.dtype) if together else i, []).append(i)
    return list(groups.values())


def check_clipped_sum(updates: Any) -> ClippedSum:
    """Returns `updates`, or raises where they are not the clipped sum of a whole gradient tree."""
    if not isinstance(updates, ClippedSum):
        raise TypeError(
            f"the noise stage got a {type(updates).__name__}, not a ClippedSum: gradients that "
            "were not clipped per example cannot be made private. Take them with "
            "dpoptax.clipped_grad, or give per-example gradients to dpoptax.clip_and_noise"
        )
    if any(map(is_masked, jax.tree.leaves(updates.sum, is_leaf=is_masked))):
        raise TypeError(
            "the clipped sum has masked leaves: the whole gradient is clipped and noised as one "
            "vector. Put optax.masked behind the noise stage, or clip the trained parameters only"
        )
    return updates


def check_mechanism(noise_multiplier: Any, batch_size: Any) -> tuple[float, float]:
    """Returns the two as numbers, or raises with the name of the one that is wrong."""
    for name, value in (("noise_multiplier", noise_multiplier), ("batch_size", batch_size)):
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"{name}={value!r}: want a Python number, known before jit, since the stated ε "
                "rests on it"
            )
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier={noise_multiplier}: want a finite number >= 0")
    if not (math.isfinite(batch_size) and batch_size > 0):
        raise ValueError(
            f"batch_size={batch_size}: want the expected number of examples a step, above 0"
        )
    return float(noise_multiplier), batch_size


def check_key(key: Any) -> jax.Array:
    """Returns `key` as a typed key, or raises where it is none."""
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return key
    elif isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(key)
    raise TypeError(f"key={key!r}: want one key, as from jax.random.key(seed)")


def copy_key(key: jax.Array) -> jax.Array:
    """A copy: a state that is donated must not delete the key of the closure."""
    data = jnp.array(jax.random.key_data(key), copy=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
