r"""An upper confidence bound on ε, where the privacy loss can be drawn and not be composed.

**The pair.** A run of T steps reveals y = C G + σZ, C lower triangular without negative entries. A
record adds u_s to the sum of step s, ‖u_s‖ ≤ 1, where it takes part, x_s = 1. What it adds may
depend on all that was revealed before. Then the run is dominated, in both directions and for all ε
at once, by

    P = Σ_x p(x) N(C x, σ²I)   against   Q = N(0, σ²I)   in T dimensions.

*Proof.* Let w_x be the likelihood ratio of the run with participations x to that without the
record, L = Σ_x p(x) w_x, and φ convex; both curves are E_Q[φ(L)]: (L − e^ε)⁺ and (1 − e^ε L)⁺.
Write step r's noise as a Brownian motion over [r − 1, r]. Under Q, dw_x = w_x ⟨m_x, dB⟩/σ with
m_x = Σ_s C_rs x_s u_s, known when the step begins. For the pair above the same holds with numbers,
m'_x = Σ_s C_rs x_s. Let V(t, w) be the mean of φ at the end of *its* run, begun at time t with
ratios w. It solves ∂_t V + ½ Σ_xx' ∂_x ∂_x' V w_x w_x' m'_x m'_x' / σ² = 0, and ∂_x ∂_x' V is a
mean of φ'' times positive numbers. As ⟨m_x, m_x'⟩ ≤ m'_x m'_x', C having no negative entry, V along
the actual run has a drift of at most 0: E φ(L) = E V(T, w) ≤ V(0, 1). (Where φ is not smooth, as
here, it is the limit of functions that are.) This is Kahane's inequality (1985), for what is
revealed step by step; Choquette-Choo et al. (2024) prove the pair otherwise.

**Importance.** Under P few losses exceed ε. With w_x the likelihood ratios of the pair, y is drawn
with the density E_x[w_x^θ]^j/Z relative to Q: from the mixture, over j independent participations
x_i, of N(θ Σ_i C x_i, σ²I) with weights in proportion to Π p(x_i) E_Q[Π w_{x_i}^θ]. By Jensen's
inequality E_x[w_x^θ]^j is at least L^(θ j) for θ outside (0, 1), so that

    X = Z (L − e^ε)⁺ / E_x[w_x^θ]^j,      θ ≥ 1,   α = θ j,
    X = Z (1 − e^ε L)⁺ / E_x[w_x^θ]^j,    θ ≤ 0,   α = 1 − θ j,

have the two values of δ(ε) as their means, and both lie in [0, M], where
M = Z (α − 1)^(α − 1) α^−α e^(−(α − 1) ε). θ = 1 and θ = 0 are drawing from P and from Q; θ = 1
with j > 1 copies draws in proportion to L^j.

**The test.** For a claim that δ(ε) ≥ m, wealth W = Π_i (1 + λ (m − X_i)) with 0 ≤ λ ≤ 1/M has a
mean of at most 1: P[W ≥ 1/β] ≤ β. λ, α and the number of samples come from other draws. W rises
with ε for the same draws, so that the least ε at which both directions reach 1/β is wrong only if
one test failed, that of the direction and the ε where δ(ε) = m in truth.

**The claim.** Each test has β = 10^-6 δ, and δ/100 is left out of m: what is stated holds but for
that probability over the draws of the accounting, also after 10^4 prices, as those of a
calibration, of which one is chosen; a statement that is wrong with probability p is a δ of p. The
draws are functions of fixed numbers and of no data.

Sources: Choquette-Choo, Ganesh, Haque, Steinke, Thakurta, "Near exact privacy amplification for
matrix mechanisms" (2024), for the pair, Monte Carlo and the failure in δ; Dong and Ganesh, "Privacy
amplification for BandMF via b-min-sep subsampling" (2026), for following a chain; Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting" (2023), for the test.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator

import numpy as np
from scipy import optimize

from dpoptax._privacy.chains import Chain, Lattice, copied, lattice

FAILURE, RESERVED = 1e-6, 1e-2
REMOVE, ADD = 0, 1
# How many samples a test gets for each M/δ: few where it is far from deciding (below log(1/β),
# about 25, none can pass), else as many as are drawn in about `_COST` sums over a state.
_FEW, _LEAST, _MOST = 35.0, 45.0, 1000.0
_COST, _OVERHEAD = 3 * 10**8, 15
_SAMPLES = 2**14, 2**25
_PILOTS = 2**11, 2**13
# Samples are drawn in chunks whose arrays stay in the processor's cache.
_CACHED, _CHUNKS, _THREADS = 2**16, (256, 4096), 8
# How many states several copies may have together, and how far a stretch is looked for.
_COPIES, _MOST_COPIED, _MOST_STRETCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 600, 64.0
# Any number would do that was not chosen for what it gives.
_SEED, _PILOT, _TEST = 20241008, 0, 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's pair. Hashable.

    Attributes:
      chain: when a record takes part.
      column: the first column of C.
      steps: T.
      sigma: the noise's standard deviation, for sums that a record adds 1 to.
    """

    chain: Chain
    column: tuple[float, ...]
    steps: int
    sigma: float

    def lattice(self, copies: int = 1) -> Lattice:
        """The states of so many independent copies."""
        arguments = self.chain, self.column, self.steps
        return lattice(*arguments) if copies == 1 else copied(*arguments, copies)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What is drawn from in the place of P or Q.

    Attributes:
      direction: REMOVE, for P against Q, or ADD, for Q against P.
      power: θ.
      copies: j.
      log_z: log Z.
    """

    direction: int
    power: float
    copies: int
    log_z: float

    @property
    def order(self) -> float:
        """α."""
        exponent = self.power * self.copies
        return exponent if self.direction == REMOVE else 1 - exponent

    @property
    def log_factor(self) -> float:
        """log Z (α − 1)^(α − 1) α^−α."""
        rest = self.order - 1
        return (
            self.log_z + (rest * math.log(rest) if rest else 0) - self.order * math.log(self.order)
        )

    def log_bound(self, epsilon: float) -> float:
        """log M: what X never exceeds, and so δ(ε) does not."""
        return self.log_factor - (self.order - 1) * epsilon


@dataclasses.dataclass(frozen=True)
class Losses:
    """Draws of a proposal.

    Attributes:
      proposal: what was drawn from.
      log_ratios: (draws,) log L.
      log_powers: (draws,) log E_x[w_x^θ].
    """

    proposal: Proposal
    log_ratios: np.ndarray
    log_powers: np.ndarray

    def values(self, epsilon: float) -> np.ndarray:
        """X at ε, (draws,)."""
        proposal = self.proposal
        removed = proposal.direction == REMOVE
        # (L − e^ε)⁺ = L (1 − e^(ε − log L))⁺, and (1 − e^ε L)⁺ has no factor.
        excess = self.log_ratios - epsilon if removed else -self.log_ratios - epsilon
        log_weight = proposal.log_z - proposal.copies * self.log_powers
        if removed:
            log_weight = log_weight + self.log_ratios
        return -np.expm1(-np.maximum(excess, 0.0)) * np.exp(log_weight)

    def root(self, delta: float, most: float) -> float:
        """The ε in [0, most] where δ is estimated to be `delta`, without any confidence."""

        def gap(epsilon: float) -> float:
            return float(self.values(epsilon).mean()) - delta

        if gap(0.0) <= 0:
            return 0.0
        return most if gap(most) >= 0 else float(optimize.brentq(gap, 0.0, most))


def epsilon_bound(run: Run, delta: float, *, most: float, effort: float = 1.0) -> float:
    """ε at δ, wrong with a probability that δ has room for; `most` where it would be more.

    Args:
      run: the pair.
      delta: in (0, 1); what truncation may take of it is taken already.
      most: an ε that is known to hold, or above which none is asked for.
      effort: how much to draw, for one; with less ε comes out larger.
    """
    log_failure, target = math.log(FAILURE * delta), (1 - RESERVED) * delta
    pilots = [_pilot(run, direction, target, most) for direction in (REMOVE, ADD)]
    roots = [pilot.root(target, most) for pilot in pilots]
    # Lower than the estimates none would pass but by chance, and M is larger there.
    least = 0.99 * max(roots)
    if least >= most:
        return most
    tests = []
    for pilot, root in zip(pilots, roots, strict=True):
        work = effort * _COST if root > 0.9 * max(roots) else 0.0
        tests.append(Test.planned(run, pilot, target, log_failure, least, work))
    if any(test.log_wealth(np.zeros(0)) < -log_failure for test in tests):
        return most  # No draws would do, not even such that are all 0.
    with _progress(sum(test.samples for test in tests)) as advance:
        wealths = [test.run(run, advance) for test in tests]

    def proven(epsilon: float) -> bool:
        # More than rounding could make of it.
        return all(wealth(epsilon) >= -log_failure + 1e-6 for wealth in wealths)

    low, high = least, most
    if proven(low):
        return low
    if not proven(high):
        return most
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if proven(middle) else (middle, high)
    return high


@dataclasses.dataclass(frozen=True)
class Test:
    """A bet against δ(ε) ≥ m in one direction, all of it fixed before a sample is drawn.

    Attributes:
      proposal: what is drawn from.
      target: m.
      least: the least ε that is asked for.
      samples: how many.
      bet: λ.
    """

    proposal: Proposal
    target: float
    least: float
    samples: int
    bet: float

    @classmethod
    def planned(
        cls,
        run: Run,
        pilot: Losses,
        target: float,
        log_failure: float,
        least: float,
        work: float,
    ) -> "Test":
        """With the λ that is best by other draws, and samples for so much work, 0 for few."""
        bound = math.exp(pilot.proposal.log_bound(least))
        each = bound / target
        fitting = work / (each * run.steps * (run.lattice().most_states + _OVERHEAD))
        needed = each * (min(_MOST, max(_LEAST, fitting)) if work else _FEW)
        samples = int(min(max(_SAMPLES[0], math.ceil(needed)), _SAMPLES[1]))
        # By the estimate; a λ of which it knows too little is less good, and no less valid.
        square = float(np.mean(pilot.values(least) ** 2)) + bound * target / 1000
        best = math.sqrt(-2 * log_failure / (samples * square))
        return cls(pilot.proposal, target, least, samples, min(best, 1 / bound))

    def run(self, run: Run, advance: Callable[[int], object]) -> Callable[[float], float]:
        """log W, as a function of ε ≥ `least`, which it rises with."""
        losses = draw(
            run, self.proposal, self.samples, seed=_TEST, least=self.least, advance=advance
        )
        return lambda epsilon: self.log_wealth(losses.values(epsilon))

    def log_wealth(self, values: np.ndarray) -> float:
        """log W of the samples, of which those that are zero may be left out."""
        zeros = self.samples - len(values)
        logs = np.log1p(self.bet * (self.target - values))
        return float(logs.sum() + zeros * math.log1p(self.bet * self.target))


def _pilot(run: Run, direction: int, target: float, most: float) -> Losses:
    """Few draws of the proposal whose M is least at ε."""
    epsilon = None
    for samples in _PILOTS:
        proposal = best_proposal(run, direction, target, epsilon)
        found = draw(run, proposal, samples, seed=_PILOT)
        epsilon = found.root(target, most)
    return found


@functools.lru_cache(maxsize=256)
def best_proposal(
    run: Run, direction: int, target: float, epsilon: float | None = None
) -> Proposal:
    """The proposal of least M at ε, or for none of least ε at which M is the target."""

    def cost(proposal: Proposal) -> float:
        if epsilon is not None:
            return proposal.log_bound(epsilon)
        if proposal.order - 1 < 1e-9:
            return math.inf
        return (proposal.log_factor - math.log(target)) / (proposal.order - 1)

    best: Proposal | None = None
    for copies in _COPIES:
        if math.comb(run.lattice().most_states + copies - 1, copies) > _MOST_COPIED and copies > 1:
            break
        states = run.lattice(copies)

        def made(log_stretch: float, states: Lattice = states) -> Proposal:
            stretch = math.exp(log_stretch)
            power = stretch if direction == REMOVE else 1 - stretch
            log_z = states.log_moment(power, run.sigma)[0]
            return Proposal(direction, power, states.copies, log_z)

        found = optimize.minimize_scalar(
            lambda x, made=made: cost(made(x)),
            bounds=(0.0, math.log(_MOST_STRETCH)),
            method="bounded",
            options={"xatol": 2e-2, "maxiter": 20},
        )
        # The ends are not tried by it: draws from P or Q themselves, or in proportion to L^j.
        proposal = min((made(float(found.x)), made(0.0)), key=cost)
        if best is not None and cost(proposal) >= cost(best):
            break
        best = proposal
    assert best is not None
    return best


def draw(
    run: Run,
    proposal: Proposal,
    samples: int,
    *,
    seed: int,
    least: float | None = None,
    advance: Callable[[int], object] | None = None,
) -> Losses:
    """Draws of L and of the power that they are weighed with, a function of its arguments alone.

    Args:
      run: the pair.
      proposal: what is drawn from.
      samples: how many.
      seed: tells draws apart.
      least: draws whose X is 0 at this ε are left out; None: they are kept.
      advance: called with numbers of draws as they are done.
    """
    states, joint = run.lattice(), run.lattice(proposal.copies)
    messages = joint.log_moment(proposal.power, run.sigma)[1]
    odds = [
        _odds(layer.log_chances, message[layer.following])
        for layer, message in zip(joint.layers, messages, strict=True)
    ]
    smallest, largest = _CHUNKS
    size = min(largest, max(smallest, _CACHED // states.most_states))

    def chunk(first: int) -> tuple[np.ndarray, np.ndarray]:
        number = min(size, samples - first)
        key = (seed, proposal.direction, first)
        rng = np.random.default_rng(np.random.SeedSequence(_SEED, spawn_key=key))
        ratios, powers = _chunk(states, joint, odds, run.sigma, proposal.power, number, rng)
        if advance is not None:
            advance(number)
        if least is None:
            return ratios, powers
        beyond = (ratios if proposal.direction == REMOVE else -ratios) > least
        return ratios[beyond], powers[beyond]

    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(chunk, range(0, samples, size)))
    ratios, powers = (np.concatenate(logs) for logs in zip(*parts, strict=True))
    return Losses(proposal, ratios, powers)


def _odds(log_chances: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """(states before, ways) the odds of each way or one before it, what is ahead included."""
    terms = log_chances + ahead
    upto = np.cumsum(np.exp(terms - terms.max(axis=1, keepdims=True)), axis=1)
    return upto[:, :-1] / upto[:, -1:]


def _chunk(
    states: Lattice,
    joint: Lattice,
    odds: list[np.ndarray],
    sigma: float,
    power: float,
    number: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """log L and log E_x[w_x^θ] of some draws: a path, y, and all paths' ratios at y."""
    path = np.zeros(number, int)
    orders = (1.0,) if power == 1.0 else (1.0, power)
    logs = np.zeros((len(orders), number))
    sums = [np.ones((1, number)) for _ in orders]
    for layer, paths, upto in zip(states.layers, joint.layers, odds, strict=True):
        way = np.zeros(number, int)
        if upto.shape[1]:
            uniform = rng.random(number)
            for column in upto.T:
                way += uniform >= column[path]
        path = paths.following[path, way]
        y = power * paths.sums[path] + sigma * rng.standard_normal(number)
        values, which = np.unique(layer.sums, return_inverse=True)
        exponents = (np.multiply.outer(values, y) - (values**2 / 2)[:, None]) / sigma**2
        for i, order in enumerate(orders):
            scaled = order * exponents
            top = scaled.max(axis=0)
            ratios = np.exp(scaled - top)
            ahead = layer.move @ sums[i]
            for place, value in enumerate(which):
                ahead[place] *= ratios[value]
            size = ahead.sum(axis=0)
            ahead /= size
            sums[i] = ahead
            logs[i] += top + np.log(size)
    return logs[0], logs[-1]


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, where tqdm is installed, for what takes more than some seconds."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda number: None
        return
    options = {"delay": 3, "disable": None, "leave": False}
    with tqdm(None, "privacy", total, unit="sample", unit_scale=True, **options) as bar:
        yield bar.update
