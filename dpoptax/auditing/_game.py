"""Targets of audits: training runs with canaries, and gradients as canaries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpoptax._clipped_grad.clipped_grad import clipped_grad
from dpoptax._clips.clip import Clip, as_clip
from dpoptax.sampling import PoissonSampler, Sampler

# The size of the gradients of `canary_gradient`, in units of the clipping bound.
_MAGNITUDE = 1e3


def leaf_projections(update: Any, canary: Any) -> jax.Array:
    """Returns the default observation, ⟨update, canary⟩/‖canary‖ for each leaf.

    Args:
      update: an output of the transform, shaped like the parameters.
      canary: the canary's contribution to the clipped sum at this step, of the same shape.

    Returns:
      float32 of shape (leaves,).
    """
    norm = jnp.maximum(optax.tree.norm(canary), jnp.finfo(jnp.float32).tiny)
    pairs = zip(jax.tree.leaves(update), jax.tree.leaves(canary), strict=True)
    return jnp.stack([jnp.vdot(u.astype(jnp.float32), c) / norm for u, c in pairs])


@dataclasses.dataclass(frozen=True)
class Game:
    """Training run that an attacker distinguishes from the run without the canary.

    Attributes:
      transform: the optax chain under attack; its noise stage states the claim.
      grad_fn: from `dpoptax.clipped_grad`.
      params: the initial parameters.
      dataset: leaves (rows, …), with a row for each of the sampler's records. The last row is the
        canary; for `audit_one_run`, every row is one. Under a `PoissonSampler`, the canary may be
        the only row; the other records then add nothing. This is the worst case for adding or
        removing one record, and the cheapest to run.
      sampler: the sampler of the batches.
      steps: number of steps of a run.
      observe: (update, canary) -> features (F,), the attacker's observation of each update.
    """

    transform: optax.GradientTransformation
    grad_fn: Callable[..., Any]
    params: Any
    dataset: Any
    sampler: Sampler
    steps: int = 1
    observe: Callable[[Any, Any], jax.Array] = leaf_projections

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"`steps` must be at least 1, got {self.steps}.")
        rows, records = self.rows, self.sampler.dataset_size
        if rows != records and not (rows == 1 and draws_alone(self.sampler)):
            raise ValueError(
                f"`dataset` must have a row for each of the sampler's {records} records, got "
                f"{rows} rows. Under a `PoissonSampler` without `max_batch_size`, a single row for "
                "the canary is also possible."
            )

    @property
    def rows(self) -> int:
        """The number of examples in `dataset`."""
        return jax.tree.leaves(self.dataset)[0].shape[0]


def canary_gradient(
    transform: optax.GradientTransformation,
    clip: Clip | float,
    params: Any,
    sampler: Sampler,
    *,
    steps: int = 1,
    background: float = 0.0,
) -> Game:
    """Returns the game in which the attacker chooses the canary's gradient.

    This is the strongest attack on a noisy sum. The loss is linear, ℓ(x; g) = ⟨x, g⟩, so an example
    *is* its gradient at all gradient points. The canary's gradient has one nonzero entry in each
    leaf, with alternating signs, and is far above the clipping bound. The gradients of the other
    examples are `background` times it.

    Args:
      transform: the chain under attack.
      clip: the clip under attack. A number C means `l2_clip(C)`.
      params: shaped like the parameters. Small ones suffice and allow more trials.
      sampler: the sampler of the batches.
      steps: number of steps of a run.
      background: 0 omits the other examples if the sampler allows it. −1 reverses their gradients,
        which reveals a dependence on the number of drawn examples.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number.
      ValueError: a leaf of `params` is empty, or its dtype is too narrow for the canary.

    >>> import dpoptax
    >>> from dpoptax.auditing import audit
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> game = canary_gradient(tx, dpoptax.l2_clip(1.0), {"w": jnp.zeros(2)}, sampler)
    >>> result = audit(game, key=jax.random.key(1), trials=10_000, delta=1e-2)
    >>> 0.5 < result.epsilon_lower_bound / result.claimed_epsilon < 1.0
    True
    """
    clip = as_clip(clip)
    magnitude = _MAGNITUDE * clip.sensitivity
    leaves, treedef = jax.tree.flatten(params)
    if not all(leaf.size for leaf in leaves):
        raise ValueError("`params` must not have an empty leaf, where no canary can be seen.")
    narrow = [leaf.dtype for leaf in leaves if magnitude > float(jnp.finfo(leaf.dtype).max)]
    if narrow:
        raise ValueError(
            f"`params` must hold a canary of {magnitude:g}, {_MAGNITUDE:g} times the clip's "
            f"sensitivity, got {narrow[0]}. Its gradient would be infinite and add zero. Pass "
            "parameters in float32, or a clip with a smaller bound."
        )
    canary = [
        jnp.zeros(leaf.size, leaf.dtype).at[0].set((-1) ** i * magnitude).reshape(leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    rows = 1 if background == 0.0 and draws_alone(sampler) else sampler.dataset_size
    weights = jnp.full(rows, background).at[-1].set(1.0)
    dataset = [jnp.tensordot(weights.astype(c.dtype), c, axes=0) for c in canary]
    return Game(
        transform,
        clipped_grad(linear_loss, clip),
        params,
        jax.tree.unflatten(treedef, dataset),
        sampler,
        steps,
    )


def draws_alone(sampler: Sampler) -> bool:
    """Returns whether a record's draws are independent of others', so that these may be omitted."""
    # A subclass may draw differently, so its samples are replayed.
    return type(sampler) is PoissonSampler and sampler.max_batch_size is None


def linear_loss(params: Any, gradient: Any) -> jax.Array:
    """Returns ⟨params, gradient⟩, a loss for which each example is its own gradient."""
    products = jax.tree.map(lambda p, g: jnp.sum(p * g.astype(p.dtype)), params, gradient)
    return jnp.asarray(sum(jax.tree.leaves(products)))
