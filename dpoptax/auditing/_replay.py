"""Runs of an audit: many with and without the canary, or one with many canaries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._points.points import GradientPoints, gradient_points
from dpoptax._random.keys import fold_in
from dpoptax._release.ledger import is_noise_state, replace_key
from dpoptax._support.tree import PyTree
from dpoptax.auditing._game import Game, leaf_projections

# Largest number of floats in the per-example gradients, or their inputs, of a chunk of runs.
_CHUNK = 2**24

# Record indices and masks of a run, (steps, draw) each.
DrawnBatches = tuple[Any, Any]
Look = Callable[[PyTree, GradientPoints], jax.Array]


def _releases(opt_state: PyTree) -> jax.Array:
    """Returns counts and refusals of all ledgers, in tree order, (ledgers, 2)."""
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=is_noise_state) if is_noise_state(x)]
    found = [(x.count, x.imprint.refused.astype(jnp.int32)) for x in states]
    return jnp.array(found, jnp.int32).reshape(-1, 2)


def _run(
    game: Game, begun: PyTree, threat_model: str, key: jax.Array, draws: DrawnBatches, look: Look
) -> tuple[Any, PyTree]:
    """Runs the game on the given draws; returns the observations and the final state.

    Args:
      game: the game.
      begun: the transform's state before any step; its keys are replaced.
      threat_model: of the audit.
      key: makes the new keys.
      draws: (steps, draw) each.
      look: the attacker's look at each update, or at the movement of a run. The results are stacked
        along a new axis of length steps, or 1.
    """

    def step(
        carry: tuple[PyTree, PyTree], draw: DrawnBatches
    ) -> tuple[tuple[PyTree, PyTree], jax.Array | None]:
        params, opt_state = carry
        points = gradient_points(opt_state, params)
        batch = jax.tree.map(lambda x: x[draw[0]], game.dataset)
        grads = game.grad_fn(points, batch, draw[1])
        updates, opt_state = game.transform.update(grads, opt_state, params)
        seen = look(updates, points) if threat_model == "white-box" else None
        return (optax.apply_updates(params, updates), opt_state), seen

    start = game.params, _with_fresh_keys(begun, key)
    (params, opt_state), seen = jax.lax.scan(step, start, draws)
    if threat_model == "last-iterate":
        moved = jax.tree.map(jnp.subtract, params, game.params)
        seen = look(moved, gradient_points(start[1], game.params))[None]
    return seen, opt_state


def _added(game: Game, points: GradientPoints, canary: PyTree) -> PyTree:
    """Returns the canary's contribution to a sum, shaped like the parameters."""
    clipped = game.grad_fn(points, canary)
    return clipped.decode(clipped.sum)


def _with_fresh_keys(opt_state: PyTree, key: jax.Array) -> PyTree:
    """Returns the state with new keys, so that each run draws fresh noise."""

    def folded(old: jax.Array) -> jax.Array:
        # Folded into the transform's key, so that a transform that ignores its key is detected.
        # Two words, since a fold of 32 bits would repeat the noise among some of 10^5 runs.
        high, low = jax.random.bits(key, (2,))
        return fold_in(fold_in(old, high), low)

    def fresh(leaf: Any) -> Any:
        if is_noise_state(leaf):
            return replace_key(leaf, folded(leaf.key))
        return folded(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(fresh, opt_state, is_leaf=is_noise_state)


def _some_draws(game: Game, key: jax.Array, included: bool | jax.Array) -> DrawnBatches:
    """Returns draws without a sampler: one canary, or all rows at every step."""
    shape = (game.steps, game.rows)
    indices = jnp.broadcast_to(jnp.arange(game.rows), shape)
    masks = jnp.ones(shape, bool)
    if game.rows == 1 and game.sampler.sampling_probability < 1.0:
        masks = jax.random.bernoulli(key, game.sampler.sampling_probability, shape)
    return indices, masks.at[:, -1].set(masks[:, -1] & included)


class Runs:
    """Computes the features of many runs, (runs, 1 or steps, F), in chunks."""

    def __init__(self, game: Game, threat_model: str, key: jax.Array) -> None:
        self.game, self.key = game, key
        self.replayed = game.rows > 1 and game.sampler.sampling_probability < 1.0

        self._begun = game.transform.init(game.params)

        # Data and the transform's key are arguments, since the compilation cache on disk stores the
        # constants of a program.
        def run(
            dataset: PyTree,
            begun: PyTree,
            key: jax.Array,
            included: jax.Array,
            draws: DrawnBatches | None,
        ) -> tuple[jax.Array, jax.Array]:
            of_data = dataclasses.replace(game, dataset=dataset)
            canary = jax.tree.map(lambda x: x[-1:], dataset)
            noise, sampling = jax.random.split(key)
            if draws is None:
                draws = _some_draws(of_data, sampling, included)

            def look(update: PyTree, points: GradientPoints) -> jax.Array:
                return game.observe(update, _added(game, points, canary))

            seen, opt_state = _run(of_data, begun, threat_model, noise, draws, look)
            return seen, _releases(opt_state)

        self._run = jax.jit(jax.vmap(run, in_axes=(None, None, 0, None, 0)))

    def __call__(self, included: bool, count: int) -> np.ndarray:
        game = self.game
        rows = game.sampler.padded_size if self.replayed else game.rows
        size = optax.tree.size(game.params)
        examples = optax.tree.size(game.dataset) // game.rows
        width = size * (rows + 2) + max(0, examples - size) * rows + 2 * game.steps
        chunk = max(1, min(count, _CHUNK // width))
        key = jax.random.fold_in(self.key, included)
        chunks = []
        for start in range(0, count, chunk):
            keys = jax.random.split(jax.random.fold_in(key, start), chunk)
            draws = self._replay(keys, included) if self.replayed else None
            seen, releases = self._run(game.dataset, self._begun, keys, included, draws)
            chunks.append(np.asarray(seen))
        self.releases = releases[0]
        return np.concatenate(chunks)[:count].astype(np.float64)

    def _replay(self, keys: jax.Array, included: bool) -> DrawnBatches:
        """Returns the sampler's draws, with a new seed for each run.

        If the canary is not included, it is masked.
        """
        sampler = self.game.sampler
        samplers = [dataclasses.replace(sampler, seed=s) for s in _seeds(keys, sampler.seed)]
        samples = [[s.sample(t) for t in range(self.game.steps)] for s in samplers]
        indices = np.array([[x.indices for x in run] for run in samples], np.int32)
        masks = np.array([[x.mask for x in run] for run in samples])
        if not included:
            masks &= indices != self.game.rows - 1
        return indices, masks


def _seeds(keys: jax.Array, like: int | bytes | None) -> list[Any]:
    """Returns a seed for each key, of the type of `like`, which selects the generator."""
    ciphered = isinstance(like, bytes)
    bits = jax.vmap(lambda key: jax.random.bits(key, (8 if ciphered else 2,)))(keys)
    if ciphered:
        return [words.tobytes() for words in np.asarray(bits)]
    return [high << 32 | low for high, low in np.asarray(bits).tolist()]


def one_run(
    game: Game, threat_model: str, key: jax.Array, included: np.ndarray
) -> tuple[np.ndarray, PyTree]:
    """Returns the canaries' scores in one run and the final state."""
    samples = [game.sampler.sample(step) for step in range(game.steps)]
    indices = np.array([x.indices for x in samples], np.int32)
    masks = np.array([x.mask for x in samples]) & included[indices]

    @jax.jit
    def run(
        dataset: PyTree, begun: PyTree, key: jax.Array, draws: DrawnBatches
    ) -> tuple[jax.Array, PyTree]:
        def look(update: PyTree, points: GradientPoints) -> jax.Array:
            def score(canary: PyTree) -> jax.Array:
                alone = jax.tree.map(lambda x: x[None], canary)
                return jnp.sum(leaf_projections(update, _added(game, points, alone)))

            return jax.lax.map(score, dataset, batch_size=64)

        of_data = dataclasses.replace(game, dataset=dataset)
        return _run(of_data, begun, threat_model, key, draws, look)

    begun = game.transform.init(game.params)
    seen, opt_state = run(game.dataset, begun, key, (indices, masks))
    return np.asarray(seen, np.float64).sum(axis=0), opt_state
