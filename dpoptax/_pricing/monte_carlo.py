r"""Upper confidence bound on ε for privacy losses that can be drawn, not composed.

A run of T steps reveals y = A G + σZ, with A lower triangular and without negative entries. A
record takes part in the steps x ∈ {0, 1}^T with probability p(x). Then the run is dominated, in
both directions and for all ε at once, by

    P = Σ_x p(x) N(A x, σ²I)   against   Q = N(0, σ²I)   in T dimensions.

**The test.** δ(ε) is the mean of an X in [0, M] that `_pricing.importance_sampling` draws. If
δ(ε) ≥ m, the wealth W = Π_i (1 + λ (m − X_i)) with 0 ≤ λ ≤ 1/M has a mean of at most 1, so
P[W ≥ 1/β] ≤ β. λ, α and the number of samples come from other draws. W increases with ε for the
same draws, and each question has independent ones. β is 10^-6 δ, and m is δ minus δ/100.

The proofs are in docs/developers/pricing.md, "Random participation with correlated noise".

Sources: Choquette-Choo, Ganesh, Haque, Steinke, Thakurta, "Near exact privacy amplification for
matrix mechanisms" (2024), for the pair, Monte Carlo and the failure in δ; Dong and Ganesh, "Privacy
amplification for BandMF via b-min-sep subsampling" (2026), for dynamic programming along a chain;
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2023), for the
test.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event

from dpoptax._pricing.custom_events import ParticipationDpEvent
from dpoptax._pricing.importance_sampling import (
    ADD,
    REMOVE,
    Losses,
    Proposal,
    Run,
    best_proposal,
    draw,
)
from dpoptax._pricing.random_allocation import AMPLIFIED_MULTIPLIERS

FAILURE, RESERVED = 1e-6, 1e-2
# The largest ε that is searched. Exponentials of larger values might overflow.
_MOST_EPSILON = 500.0
# Samples of a test, in units of M/δ: `_FEW` if the other direction decides, and otherwise as many
# as about `_COST` sums over a state allow. Below log(1/β), about 25, no test can pass.
_FEW, _LEAST, _MOST = 35.0, 45.0, 1000.0
_COST, _OVERHEAD = 3 * 10**8, 15
_SAMPLES = 2**14, 2**25
_PILOTS = 2**11, 2**13
# Separate the draws of plans and of tests.
_PILOT, _TEST = "pilot", "test"


def epsilon_of(
    event: Event,
    delta: float,
    relation: dpa.NeighboringRelation,
    bounded: Callable[[Event], float],
    effort: float,
) -> float:
    """Returns an upper confidence bound on ε, at most that of the event's composable bound.

    Args:
      event: the releases of one run.
      delta: in (0, 1).
      relation: the neighboring relation.
      bounded: returns the ε of a composable event at δ.
      effort: as for `epsilon_bound`.
    """
    if isinstance(event, dpa.NoOpDpEvent):
        return 0.0
    if isinstance(event, dpa.NonPrivateDpEvent):
        return math.inf
    if not isinstance(event, ParticipationDpEvent):
        raise ValueError(
            "`accountant` must be 'pld' or 'rdp', except for one run with a "
            "RandomAllocationSampler or a MinSeparationSampler, got 'monte_carlo' for an event of "
            f"type {type(event).__name__}."
        )
    if relation is dpa.NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            "`neighboring_relation` must be the sampler's for accountant='monte_carlo', got "
            "'replace_one'."
        )
    known = bounded(event.bound)
    lowest, highest = AMPLIFIED_MULTIPLIERS
    if event.overflow >= delta or not lowest <= event.noise_multiplier <= highest:
        return known
    run = Run(event.chain, event.column, event.steps, event.noise_multiplier)
    most = min(known, _MOST_EPSILON)
    found = epsilon_bound(run, delta - event.overflow, most=most, effort=effort)
    return found if found < most else known


@functools.lru_cache(maxsize=256)
def epsilon_bound(run: Run, delta: float, *, most: float, effort: float = 1.0) -> float:
    """Returns an ε at δ, at most `most`; δ covers the probability that it is wrong.

    This takes up to a minute, so results are kept.

    Args:
      run: the pair.
      delta: in (0, 1), without the overflow of batches.
      most: an ε that is known to hold, or the greatest ε of interest.
      effort: relative number of draws; fewer draws give a larger ε.
    """
    log_failure, target = math.log(FAILURE * delta), (1 - RESERVED) * delta
    question = repr((run, float(delta), float(effort)))
    pilots = [_pilot(run, direction, target, most, question) for direction in (REMOVE, ADD)]
    roots = [pilot.root(target, most) for pilot in pilots]
    # Below the estimates, a test would pass only by chance, and M is larger.
    least = 0.99 * max(roots)
    if least >= most:
        return most
    tests = []
    for pilot, root in zip(pilots, roots, strict=True):
        work = effort * _COST if root > 0.9 * max(roots) else 0.0
        tests.append(Test.planned(run, pilot, target, log_failure, least, work))
    if any(test.log_wealth(np.zeros(0)) < -log_failure for test in tests):
        return most  # No test can pass, even if all samples are 0.
    wealths = [test.run(run, question) for test in tests]

    def proven(epsilon: float) -> bool:
        # 1e-6 covers the rounding.
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
    """Bet against δ(ε) ≥ m in one direction, fixed before samples are drawn.

    Attributes:
      proposal: the distribution to draw from.
      target: m.
      least: the least ε of interest.
      samples: number of samples.
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
        """Plans a test with the best λ for the pilot's draws and the samples for `work`."""
        bound = math.exp(pilot.proposal.log_bound(least))
        each = bound / target
        fitting = work / (each * run.steps * (run.lattice().most_states + _OVERHEAD))
        needed = each * (min(_MOST, max(_LEAST, fitting)) if work else _FEW)
        samples = int(min(max(_SAMPLES[0], math.ceil(needed)), _SAMPLES[1]))
        # The test is valid for any λ; a poor estimate only makes it less powerful.
        square = float(np.mean(pilot.values(least) ** 2)) + bound * target / 1000
        best = math.sqrt(-2 * log_failure / (samples * square))
        return cls(pilot.proposal, target, least, samples, min(best, 1 / bound))

    def run(self, run: Run, question: str) -> Callable[[float], float]:
        """Draws the samples and returns log W, an increasing function of ε ≥ `least`."""
        seed = _TEST, question
        losses = draw(run, self.proposal, self.samples, seed=seed, least=self.least)
        return lambda epsilon: self.log_wealth(losses.values(epsilon))

    def log_wealth(self, values: np.ndarray) -> float:
        """Returns log W of the samples; samples that are zero may be omitted."""
        zeros = self.samples - len(values)
        logs = np.log1p(self.bet * (self.target - values))
        return float(logs.sum() + zeros * math.log1p(self.bet * self.target))


def _pilot(run: Run, direction: int, target: float, most: float, question: str) -> Losses:
    """Returns a few draws of the proposal with the least M at ε."""
    epsilon = None
    for samples in _PILOTS:
        proposal = best_proposal(run, direction, target, epsilon)
        found = draw(run, proposal, samples, seed=(_PILOT, question))
        epsilon = found.root(target, most)
    return found
