r"""Importance sampling of the privacy loss.

The dominating pair is that of `dpoptax._pricing.monte_carlo`: P = Σ_x p(x) N(A x, σ²I) and
Q = N(0, σ²I). Let w_x be the likelihood ratio of N(A x, σ²I) to Q, and L = Σ_x p(x) w_x. Under P
few losses log L exceed ε. So y is drawn with the density E_x[w_x^θ]^j/Z relative to Q. This is a
mixture of N(θ Σ_i A x_i, σ²I) over j independent participations x_i, with weights in proportion to
Π p(x_i) E_Q[Π w_{x_i}^θ]. By Jensen's inequality, E_x[w_x^θ]^j is at least L^(θ j) for θ outside
(0, 1). So the variables

    X = Z (L − e^ε)⁺ / E_x[w_x^θ]^j,      θ ≥ 1,   α = θ j,
    X = Z (1 − e^ε L)⁺ / E_x[w_x^θ]^j,    θ ≤ 0,   α = 1 − θ j,

have the two values of δ(ε) as their means and are in [0, M], with
M = Z (α − 1)^(α − 1) α^−α e^(−(α − 1) ε). With one copy, θ = 1 draws from P and θ = 0 from Q. With
j > 1 copies, θ = 1 draws in proportion to L^j.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import math
import os

import numpy as np
from scipy import optimize

from dpoptax._pricing.participation_chains import Chain, Lattice, copied, lattice

REMOVE, ADD = 0, 1
# Samples are drawn in chunks, so that arrays stay in the processor's cache.
_CACHED, _CHUNKS, _THREADS = 2**16, (256, 4096), 8
# Numbers of copies to try, the largest number of their joint states, and the largest stretch.
_COPIES, _MOST_COPIED, _MOST_STRETCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 600, 64.0
# Arbitrary, and not chosen by its results.
_SEED = 20241008


@dataclasses.dataclass(frozen=True)
class Run:
    """Dominating pair of a run. Hashable.

    Attributes:
      chain: the law of a record's participations.
      column: the first column of A.
      steps: T.
      sigma: the standard deviation of the noise, in units of a record's contribution.
    """

    chain: Chain
    column: tuple[float, ...]
    steps: int
    sigma: float

    def lattice(self, copies: int = 1) -> Lattice:
        """Returns the lattice of independent copies."""
        arguments = self.chain, self.column, self.steps
        return lattice(*arguments) if copies == 1 else copied(*arguments, copies)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Distribution from which samples are drawn instead of P or Q.

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
        """Returns log M; M is an upper bound on X, and thus on δ(ε)."""
        return self.log_factor - (self.order - 1) * epsilon


@dataclasses.dataclass(frozen=True)
class Losses:
    """Draws of a proposal.

    Attributes:
      proposal: the distribution that was drawn from.
      log_ratios: (draws,) log L.
      log_powers: (draws,) log E_x[w_x^θ].
    """

    proposal: Proposal
    log_ratios: np.ndarray
    log_powers: np.ndarray

    def values(self, epsilon: float) -> np.ndarray:
        """Returns X at ε, (draws,)."""
        proposal = self.proposal
        removed = proposal.direction == REMOVE
        # (L − e^ε)⁺ = L (1 − e^(ε − log L))⁺ has the factor L, (1 − e^ε L)⁺ has none.
        excess = self.log_ratios - epsilon if removed else -self.log_ratios - epsilon
        log_weight = proposal.log_z - proposal.copies * self.log_powers
        if removed:
            log_weight = log_weight + self.log_ratios
        return -np.expm1(-np.maximum(excess, 0.0)) * np.exp(log_weight)

    def root(self, delta: float, most: float) -> float:
        """Estimates the ε in [0, most] at δ, without a confidence bound."""

        def gap(epsilon: float) -> float:
            return float(self.values(epsilon).mean()) - delta

        if gap(0.0) <= 0:
            return 0.0
        return most if gap(most) >= 0 else float(optimize.brentq(gap, 0.0, most))


@functools.lru_cache(maxsize=256)
def best_proposal(
    run: Run, direction: int, target: float, epsilon: float | None = None
) -> Proposal:
    """Returns the proposal with the least M at ε, or the least ε at M = target."""

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
        # The search does not try its lower end, which draws from P, Q or in proportion to L^j.
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
    seed: object,
    least: float | None = None,
) -> Losses:
    """Draws L and E_x[w_x^θ], as a function of the arguments only.

    Args:
      run: the pair.
      proposal: the distribution to draw from.
      samples: number of draws.
      seed: any value; draws of seeds with different texts are independent.
      least: draws with X = 0 at this ε are omitted; None keeps them.
    """
    states, joint = run.lattice(), run.lattice(proposal.copies)
    own = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=16).digest())
    messages = joint.log_moment(proposal.power, run.sigma)[1]
    odds = [
        _odds(layer.log_chances, message[layer.following])
        for layer, message in zip(joint.layers, messages, strict=True)
    ]
    smallest, largest = _CHUNKS
    size = min(largest, max(smallest, _CACHED // states.most_states))

    def chunk(first: int) -> tuple[np.ndarray, np.ndarray]:
        number = min(size, samples - first)
        key = (proposal.direction, first)
        rng = np.random.default_rng(np.random.SeedSequence([_SEED, own], spawn_key=key))
        ratios, powers = _chunk(states, joint, odds, run.sigma, proposal.power, number, rng)
        if least is None:
            return ratios, powers
        # Keeps NaN, so that later comparisons fail.
        beyond = ~((ratios if proposal.direction == REMOVE else -ratios) <= least)
        return ratios[beyond], powers[beyond]

    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(chunk, range(0, samples, size)))
    ratios, powers = (np.concatenate(logs) for logs in zip(*parts, strict=True))
    return Losses(proposal, ratios, powers)


def _odds(log_chances: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Returns cumulative odds of transitions given later steps, (before, ways)."""
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
    """Draws log L and log E_x[w_x^θ]."""
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
        # Many states share a sum, and exponentials take most of the time.
        values, which = np.unique(layer.sums, return_inverse=True)
        exponents = (np.multiply.outer(values, y) - (values**2 / 2)[:, None]) / sigma**2
        for i, order in enumerate(orders):
            scaled = order * exponents
            top = scaled.max(axis=0)
            ratios = np.exp(scaled - top)
            ahead = layer.move @ sums[i]
            for place, value in enumerate(which):
                ahead[place] *= ratios[value]
            # Rescaled in every step, since products of thousands of ratios would overflow.
            size = ahead.sum(axis=0)
            ahead /= size
            sums[i] = ahead
            logs[i] += top + np.log(size)
    return logs[0], logs[-1]
