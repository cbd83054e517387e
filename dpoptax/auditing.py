"""Audits: attacks on a live training step, and the lower bounds on epsilon that they prove.

A privacy claim says that no one can tell well whether an example was in the data. An audit tries:
the attacker plants a *canary*, sees what the threat model lets out, and guesses. From how often the
guesses are right follows, with a stated confidence, an ε that the mechanism cannot be below. A
bound above the claim disproves the claim: a bug. A bound near it says that the attack can see, and
that the claim is no larger than it has to be. A bound below proves nothing about other attacks.

What runs is the step that is trained with: `dpoptax.clipped_grad` and the optax chain, over
thousands of runs at once, on samples of the sampler that the claim is made for. The estimators are
those of `jax_privacy.auditing`: install `dpoptax[audit]`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.auditing import CanaryScoreAuditor, Explicit

from dpoptax import _attacks, accounting
from dpoptax._clipping import Clip, check_clip
from dpoptax._gradients import clipped_grad
from dpoptax._noise import check_key, is_ledger
from dpoptax._points import gradient_points
from dpoptax.sampling import PoissonSampler, Sampler

ThreatModel = Literal["white-box", "last-iterate"]

# How much larger than the clip bound the gradients of `canary_gradient` are.
_MAGNITUDE = 1e3
# Floats that a chunk of runs may hold in per-example gradients.
_CHUNK = 2**24


def leaf_projections(update: Any, canary: Any) -> chex.Array:
    """What an attacker looks at by default: for each leaf, ⟨update, canary⟩/‖canary‖.

    Args:
      update: what the transform let out, shaped like the parameters.
      canary: what the canary adds to the clipped sum at this step, shaped like the parameters.

    Returns:
      float32 of shape (leaves,).
    """
    norm = jnp.maximum(optax.tree.norm(canary), jnp.finfo(jnp.float32).tiny)
    pairs = zip(jax.tree.leaves(update), jax.tree.leaves(canary), strict=True)
    return jnp.stack([jnp.vdot(u.astype(jnp.float32), c) / norm for u, c in pairs])


@dataclasses.dataclass(frozen=True)
class Game:
    """A training run that an attacker tells from the same run without the canary.

    Attributes:
      transform: the optax chain under attack; its noise stage says what is claimed.
      grad_fn: from `dpoptax.clipped_grad`.
      params: where training starts.
      dataset: leaves (rows, …); the last row is the canary, or the last rows for
        `audit_one_run`. As many rows as the sampler's `dataset_size`, or one row: the canary
        alone, under a `PoissonSampler`, whose other records then add nothing. That is the worst
        case for adding or removing one record, and the cheapest to run.
      sampler: draws the batches, and prices them.
      steps: number of steps of a run.
      observe: (update, canary) -> features (F,), what is looked at in each update.
    """

    transform: optax.GradientTransformation
    grad_fn: Callable[..., Any]
    params: Any
    dataset: Any
    sampler: Sampler
    steps: int = 1
    observe: Callable[[Any, Any], chex.Array] = leaf_projections

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: want at least 1")
        rows, records = self.rows, self.sampler.dataset_size
        if rows != records and not (rows == 1 and self.alone):
            raise ValueError(
                f"dataset has {rows} rows, and the sampler draws from {records}: want a row for "
                "each record, or the canary's alone under a PoissonSampler without max_batch_size"
            )

    @property
    def rows(self) -> int:
        """The number of examples in `dataset`."""
        return jax.tree.leaves(self.dataset)[0].shape[0]

    @property
    def alone(self) -> bool:
        """Whether a record's draws depend on no other record's, so that they can be left out."""
        poisson = isinstance(self.sampler, PoissonSampler)
        return poisson and self.sampler.max_batch_size is None  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes:
      claimed_epsilon: the ε that the ledger and the sampler state at `delta`.
      epsilon_lower_bound: with probability `confidence`, the true ε at `delta` is no smaller.
      delta: δ of both.
      confidence: of the bound.
      trials: training runs with the canary, and as many without; canaries for a one-run audit.
      threat_model: what the attacker saw.
      attack: the score by which the attacker decided.
      seconds: wall time.
    """

    claimed_epsilon: float
    epsilon_lower_bound: float
    delta: float
    confidence: float
    trials: int
    threat_model: str
    attack: str
    seconds: float

    @property
    def violated(self) -> bool:
        """Whether the bound exceeds the claim, which then is false."""
        return self.epsilon_lower_bound > self.claimed_epsilon

    def __str__(self) -> str:
        verdict = "VIOLATED" if self.violated else "not contradicted"
        return (
            f"claimed ε = {self.claimed_epsilon:.3f}, audited ε ≥ {self.epsilon_lower_bound:.3f} "
            f"at δ = {self.delta:g} with {100 * self.confidence:g} % confidence "
            f"({self.threat_model}, {self.attack}, {self.trials} trials): {verdict}"
        )


def canary_gradient(
    transform: optax.GradientTransformation,
    clip: Clip,
    params: Any,
    sampler: Sampler,
    *,
    steps: int = 1,
    background: float = 0.0,
) -> Game:
    """The game of an attacker who chooses the canary's gradient, the strongest for a noisy sum.

    The loss is linear, ℓ(x; g) = ⟨x, g⟩, so that an example *is* its gradient, whatever the
    gradient points are. The canary's has one entry in each leaf, of alternating signs, and is far
    above the clip bound; the other examples' gradients are `background` times it.

    Args:
      transform: the chain under attack.
      clip: the geometry under attack.
      params: shaped like the parameters; small ones will do, and make for more trials.
      sampler: draws the batches.
      steps: number of steps of a run.
      background: 0 leaves the other examples out, where the sampler allows; −1 pulls them the
        other way, which shows what depends on how many examples were drawn.

    Raises:
      TypeError: `clip` is no geometry.
      ValueError: parameters with an empty leaf.

    >>> import dpoptax
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> game = canary_gradient(tx, dpoptax.l2_clip(1.0), {"w": jnp.zeros(2)}, sampler)
    >>> result = audit(game, key=jax.random.key(1), trials=10_000, delta=1e-2)
    >>> 0.5 < result.epsilon_lower_bound / result.claimed_epsilon < 1.0
    True
    """
    magnitude = _MAGNITUDE * check_clip(clip).sensitivity
    leaves, treedef = jax.tree.flatten(params)
    if not all(leaf.size for leaf in leaves):
        raise ValueError("params has an empty leaf, which no canary can be seen in")
    canary = [
        jnp.zeros(leaf.size, leaf.dtype).at[0].set((-1) ** i * magnitude).reshape(leaf.shape)
        for i, leaf in enumerate(leaves)
    ]
    poisson = isinstance(sampler, PoissonSampler)
    rows = 1 if background == 0.0 and poisson else sampler.dataset_size
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


def canary_gradients(
    transform: optax.GradientTransformation,
    clip: Clip,
    size: int,
    sampler: Sampler,
    *,
    steps: int = 1,
) -> Game:
    """The game of `audit_one_run` whose canaries are orthogonal gradients, one for each record.

    The parameters are a vector of `size` entries, at least as many as there are records; example
    i's gradient is the i-th unit vector, far above the clip bound.

    Raises:
      TypeError: `clip` is no geometry.
      ValueError: fewer entries than records.
    """
    magnitude = _MAGNITUDE * check_clip(clip).sensitivity
    if size < sampler.dataset_size:
        raise ValueError(f"size={size}: want an entry for each of {sampler.dataset_size} records")
    dataset = magnitude * jnp.eye(sampler.dataset_size, size)
    grad_fn = clipped_grad(linear_loss, clip)
    return Game(transform, grad_fn, jnp.zeros(size), dataset, sampler, steps)


def linear_loss(params: Any, gradient: Any) -> chex.Array:
    """⟨params, gradient⟩: the loss whose examples are their gradients."""
    products = jax.tree.map(lambda p, g: jnp.sum(p * g.astype(p.dtype)), params, gradient)
    return sum(jax.tree.leaves(products))


def audit(
    game: Game,
    *,
    key: chex.PRNGKey,
    trials: int = 100_000,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by telling runs with the canary from runs without.

        ε ≥ log((TPR − δ) / FPR),  TPR and FPR by their Clopper–Pearson bounds

    and the same with the two kinds of run exchanged. On a quarter of the runs the attacker learns:
    how the noise on what it sees is correlated over leaves and steps, where the canary moves it to,
    and which score and threshold tell most (`dpoptax._attacks`). On the others the bound is
    computed, for that one score and threshold; so it is valid whatever was learned.

    The chain's stages behind the noise are no obstacle as long as they are linear: learning the
    correlations inverts any filter.

    Args:
      game: what is attacked.
      key: of the attack's randomness. The transform's own keys are replaced, a new one each run.
      trials: training runs with the canary, and as many without. A bound above ε needs more than
        e^ε of them; 10⁶ see most of ε at δ = 10⁻⁵.
      delta: δ of the claim and of the bound.
      confidence: that the bound holds, over the audit's randomness.
      threat_model: "white-box": the attacker sees every update that the transform lets out, or
        all released sums if the transform is the noise stage alone. "last-iterate": only the
        parameters at the end.
      claimed_epsilon: the claim, where it is not the ledger's and the sampler's.

    Raises:
      ValueError: too few trials, a bad threat model, or as `accounting.epsilon_spent`.

    Sources: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning", 2020;
    Nasr et al., "Tight auditing of differentially private machine learning", 2023.
    """
    _check(trials, confidence, threat_model)
    start = time.perf_counter()
    runs = _Runs(game, threat_model, check_key(key))
    seen = [runs(included, trials) for included in (True, False)]
    if claimed_epsilon is None:
        claimed_epsilon = _claim(game, runs.releases, delta)
    probability = game.sampler.sampling_probability if threat_model == "white-box" else 1.0
    learning = max(trials // 4, 8)
    attack = _attacks.learn(
        *(features[:learning] for features in seen),
        probability=probability,
        delta=delta,
        significance=1 - confidence,
    )
    scores = CanaryScoreAuditor(*(attack.score(features[learning:]) for features in seen))
    bound = scores.epsilon_clopper_pearson(
        1 - confidence, delta, one_sided=False, threshold_strategy=Explicit(attack.threshold)
    )
    return AuditResult(
        claimed_epsilon=float(claimed_epsilon),
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=trials,
        threat_model=threat_model,
        attack=attack.name,
        seconds=time.perf_counter() - start,
    )


def audit_one_run(
    game: Game,
    *,
    key: chex.PRNGKey,
    canaries: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by a single training run with many canaries, each in or out by a coin.

    A canary's score is how far the run went along its clipped gradient. The attacker calls those
    with the highest scores in, and ε follows from how many are. Weaker than `audit`, and as cheap
    as a run: the audit for models that are trained once.

    Where every record is in every step, what is claimed is a Gaussian mechanism, and the bound is
    for its whole trade-off curve. Otherwise it is for (ε, δ) alone, which sees little unless δ is
    far below (1 − confidence)/canaries.

    Args:
      game: what is attacked, with a row for each record.
      key: of the coins and the noise.
      canaries: how many of the dataset's last rows are canaries; all by default. The other rows
        are always in.
      delta: δ of the claim and of the bound.
      confidence: that the bound holds. It is shared among six numbers of guesses.
      threat_model: "white-box": all updates; "last-iterate": the parameters at the end.
      claimed_epsilon: the claim, where it is not the ledger's and the sampler's.

    Raises:
      ValueError: fewer than 64 canaries, a bad threat model, or as `accounting.epsilon_spent`.

    Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", 2023; for
    the trade-off curve, Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one
    run", 2024.
    """
    canaries = game.rows if canaries is None else canaries
    if not 64 <= canaries <= game.rows:
        raise ValueError(f"canaries={canaries}: want between 64 and the {game.rows} rows")
    _check(canaries, confidence, threat_model)
    start = time.perf_counter()
    run_key, coin_key = jax.random.split(check_key(key))
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (canaries,)))
    scores, opt_state = _one_run(game, threat_model, run_key, included)
    if claimed_epsilon is None:
        claimed_epsilon = accounting.epsilon_spent(opt_state, game.sampler, delta)
    estimator = CanaryScoreAuditor(scores[included], scores[~included])
    # The numbers of guesses are fixed in advance, so that sharing the significance is enough.
    guesses = sorted({max(16, canaries // 2**i) for i in range(1, 7)})
    ranked = np.sort(scores)[::-1]
    gaussian = game.sampler.sampling_probability == 1.0
    epsilon = estimator.epsilon_one_run_fdp if gaussian else estimator.epsilon_one_run
    bound = max(
        epsilon((1 - confidence) / len(guesses), delta, threshold_strategy=Explicit(ranked[k - 1]))
        for k in guesses
    )
    return AuditResult(
        claimed_epsilon=float(claimed_epsilon),
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=canaries,
        threat_model=threat_model,
        attack="one run, highest projections",
        seconds=time.perf_counter() - start,
    )


def _check(trials, confidence, threat_model):
    if not trials >= 64:
        raise ValueError(f"trials={trials}: want at least 64; a bound above ε needs over e^ε")
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"confidence={confidence}: want a number in (0.5, 1)")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(f"threat_model={threat_model!r}: want 'white-box' or 'last-iterate'")


def _claim(game, releases, delta):
    """ε of the ledger after as many releases as a run was seen to make."""
    counts = iter(np.asarray(releases).tolist())

    def spent(leaf):
        if not is_ledger(leaf):
            return leaf
        return dataclasses.replace(leaf, count=np.int32(next(counts)))

    opt_state = jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_ledger)
    return accounting.epsilon_spent(opt_state, game.sampler, delta)


def _releases(opt_state):
    """The counts of all ledgers, in tree order."""
    leaves = jax.tree.leaves(opt_state, is_leaf=is_ledger)
    return jnp.array([leaf.count for leaf in leaves if is_ledger(leaf)], jnp.int32)


def _run(game, threat_model, key, indices, masks):
    """One run on the given draws, (steps, draw) each: features (1 or steps, F), final state."""
    canary = jax.tree.map(lambda x: x[-1:], game.dataset)

    def step(carry, draw):
        params, opt_state = carry
        points = gradient_points(opt_state, params)
        batch = jax.tree.map(lambda x: x[draw[0]], game.dataset)
        grads = game.grad_fn(points, batch, draw[1])
        updates, opt_state = game.transform.update(grads, opt_state, params)
        seen = None
        if threat_model == "white-box":
            seen = game.observe(updates, _added(game, points, canary))
        return (optax.apply_updates(params, updates), opt_state), seen

    start = game.params, _with_fresh_keys(game.transform.init(game.params), key)
    (params, opt_state), seen = jax.lax.scan(step, start, (indices, masks))
    if threat_model == "last-iterate":
        points = gradient_points(start[1], game.params)
        moved = jax.tree.map(jnp.subtract, params, game.params)
        seen = game.observe(moved, _added(game, points, canary))[None]
    return seen, opt_state


def _added(game, points, canary):
    """What the canary adds to the sum of a step, shaped like the parameters."""
    clipped = game.grad_fn(points, canary)
    return clipped.clip.decode(clipped.sum, clipped.reference)


def _with_fresh_keys(opt_state, key):
    """The state with each of its keys replaced: a run draws noise of its own."""

    def fresh(leaf):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        # Folded into the transform's own key, so that a transform which ignores it is seen to.
        return jax.random.fold_in(leaf, jax.random.bits(key))

    return jax.tree.map(fresh, opt_state)


def _some_draws(game, key, included):
    """Draws of one run that need no sampler: the canary alone, or everything at every step."""
    shape = (game.steps, game.rows)
    indices = jnp.broadcast_to(jnp.arange(game.rows), shape)
    probability = game.sampler.sampling_probability if game.rows == 1 else 1.0
    masks = jnp.ones(shape, bool)
    if probability < 1.0:
        masks = jax.random.bernoulli(key, probability, shape)
    return indices, masks.at[:, -1].set(masks[:, -1] & included)


class _Runs:
    """Features of many runs, (runs, 1 or steps, F), computed in chunks."""

    def __init__(self, game, threat_model, key):
        self.game, self.key = game, key
        self.replayed = game.rows > 1 and game.sampler.sampling_probability < 1.0

        def run(key, included, draws):
            noise, sampling = jax.random.split(key)
            draws = draws if self.replayed else _some_draws(game, sampling, included)
            seen, opt_state = _run(game, threat_model, noise, *draws)
            return seen, _releases(opt_state)

        self._run = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))

    def __call__(self, included, count):
        game = self.game
        rows = game.sampler.padded_size if self.replayed else game.rows
        width = (
            sum(leaf.size for leaf in jax.tree.leaves(game.params)) * (rows + 2) + 2 * game.steps
        )
        chunk = max(1, min(count, _CHUNK // width))
        key = jax.random.fold_in(self.key, included)
        chunks = []
        for start in range(0, count, chunk):
            keys = jax.random.split(jax.random.fold_in(key, start), chunk)
            draws = self._replay(keys, included) if self.replayed else None
            seen, releases = self._run(keys, included, draws)
            chunks.append(np.asarray(seen))
        self.releases = releases[0]
        return np.concatenate(chunks)[:count].astype(np.float64)

    def _replay(self, keys, included):
        """The sampler's own draws, under a fresh seed each run; the canary's masked if not in."""
        seeds = np.asarray(jax.vmap(jax.random.bits)(keys)).tolist()
        samplers = [dataclasses.replace(self.game.sampler, seed=seed) for seed in seeds]
        samples = [[s.sample(t) for t in range(self.game.steps)] for s in samplers]
        indices = np.array([[x.indices for x in run] for run in samples], np.int32)
        masks = np.array([[x.mask for x in run] for run in samples])
        if not included:
            masks &= indices != self.game.rows - 1
        return indices, masks


def _one_run(game, threat_model, key, included):
    """Each canary's score in one run, the sum of projections on its clipped gradient; state."""
    first = game.rows - len(included)
    kept = jnp.concatenate([jnp.ones(first, bool), included])
    samples = [game.sampler.sample(step) for step in range(game.steps)]
    canaries = jax.tree.map(lambda x: x[first:], game.dataset)

    def project(update, points):
        def score(canary):
            alone = jax.tree.map(lambda x: x[None], canary)
            return jnp.sum(leaf_projections(update, _added(game, points, alone)))

        return jax.lax.map(score, canaries, batch_size=64)

    @jax.jit
    def step(params, opt_state, indices, mask):
        points = gradient_points(opt_state, params)
        batch = jax.tree.map(lambda x: x[indices], game.dataset)
        grads = game.grad_fn(points, batch, mask & kept[indices])
        updates, opt_state = game.transform.update(grads, opt_state, params)
        seen = project(updates, points) if threat_model == "white-box" else 0.0
        return optax.apply_updates(params, updates), opt_state, seen

    params, opt_state = game.params, _with_fresh_keys(game.transform.init(game.params), key)
    points, total = gradient_points(opt_state, params), 0.0
    for indices, mask in samples:
        params, opt_state, seen = step(params, opt_state, indices, mask)
        total += seen
    if threat_model == "last-iterate":
        total = project(jax.tree.map(jnp.subtract, params, game.params), points)
    return np.asarray(total), opt_state
