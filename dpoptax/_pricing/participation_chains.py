"""Participations of a record as Markov chains, with correlated noise.

A record's participations x ∈ {0, 1}^T are drawn from a chain with few states, independently of all
other records. The correlated noise is A⁻¹Z, with A a lower-triangular Toeplitz matrix. So the run
reveals A G + Z, and the record changes entry t by (A x)_t. This depends only on participations that
the column of A still reaches. They are the states of a `Lattice`, with their probabilities, which
`dpoptax._pricing.monte_carlo` prices.
"""

import abc
import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy import sparse

# With more states per step, a sample takes seconds.
MOST_STATES = 4096


class Chain(abc.ABC):
    """Law of a record's participations. Hashable; the states are integers."""

    period: int
    """The number of steps after which `move` repeats."""

    @abc.abstractmethod
    def start(self) -> dict[int, float]:
        """Returns the states before step 0 and their probabilities."""

    @abc.abstractmethod
    def move(self, step: int, state: int) -> tuple[float, int, int]:
        """Returns the probability of taking part, and the next states with and without it."""


@dataclasses.dataclass(frozen=True)
class AllocationChain(Chain):
    """Participation in exactly k of each T steps.

    The state is the number of participations in the current period.

    Attributes:
      period: T.
      participations: k.
    """

    period: int
    participations: int

    def start(self) -> dict[int, float]:
        """Returns the state without any participation."""
        return {0: 1.0}

    def move(self, step: int, state: int) -> tuple[float, int, int]:
        """Returns the probability (k − c)/(T − t) and the next states."""
        place = step % self.period
        probability = (self.participations - state) / (self.period - place)
        if place == self.period - 1:
            return probability, 0, 0
        return probability, state + 1, state


@dataclasses.dataclass(frozen=True)
class SeparatedChain(Chain):
    """Participation with probability p, then b − 1 steps of rest.

    The state is the number of remaining steps of rest.

    Attributes:
      separation: b.
      probability: p.
      period: 1.
    """

    separation: int
    probability: float
    period: int = 1

    def start(self) -> dict[int, float]:
        """Returns the stationary law."""
        resting = self.probability / (1 + (self.separation - 1) * self.probability)
        free = 1 - (self.separation - 1) * resting
        states = {rest: resting for rest in range(1, self.separation)}
        return states | ({0: free} if free > 0 else {})

    def move(self, step: int, state: int) -> tuple[float, int, int]:
        """Returns the probability p, or 0 at rest, and the next states."""
        del step
        if state:
            return 0.0, self.separation - 1, state - 1
        return self.probability, self.separation - 1, 0


# Maps a state of the chain and the ages, in steps, of the participations in reach to an index.
_States = dict[tuple[int, tuple[int, ...]], int]


@dataclasses.dataclass(frozen=True)
class Layer:
    """States of a step and the transitions to them.

    Attributes:
      sums: (states,) (A x)_t, summed over copies.
      squares: (states,) its square, summed over copies.
      move: (states, states before), the transition probabilities.
      following: (states before, ways) the next states of each, padded by repeating the last one.
      log_chances: (states before, ways) the logarithms of their probabilities, −∞ for repetitions.
    """

    sums: np.ndarray
    squares: np.ndarray
    move: "sparse.csr_matrix"
    following: np.ndarray
    log_chances: np.ndarray

    def behind(self, message: np.ndarray) -> np.ndarray:
        """Returns (states before,) log E[exp(message of the next state)]."""
        terms = self.log_chances + message[self.following]
        top = terms.max(axis=1)
        return top + np.log(np.exp(terms - top[:, None]).sum(axis=1))


@dataclasses.dataclass(frozen=True)
class Lattice:
    """States of a run: chain states with the participations in the column's reach.

    Attributes:
      layers: one per step; there is one state before the first step.
      copies: number of independent copies of the record.
    """

    layers: tuple[Layer, ...]
    copies: int = 1

    @property
    def most_states(self) -> int:
        """The greatest number of states of a step."""
        return max(len(layer.sums) for layer in self.layers)

    def log_moment(self, power: float, sigma: float) -> tuple[float, list[np.ndarray]]:
        """Returns log E[exp(Σ_t (θ² sum_t² − θ square_t)/(2σ²))] and its parts.

        θ is the power. The logarithm is log E_Q[Π_i w_{x_i}^θ] for independent copies x_i of the
        participations, with w_x the likelihood ratio of N(A x, σ²I) to Q = N(0, σ²I).

        Returns:
          The logarithm, and one (states,) array per step: the logarithm given the state, with the
          sum over this and later steps.
        """
        ahead = np.zeros(len(self.layers[-1].sums))
        messages = []
        for layer in self.layers[::-1]:
            exponent = (power * layer.sums) ** 2 - power * layer.squares
            messages.append(exponent / (2 * sigma**2) + ahead)
            ahead = layer.behind(messages[-1])
        return float(ahead[0]), messages[::-1]

    def greatest_norm(self) -> float:
        """Returns the greatest ‖A x‖ of positive probability."""
        ahead = np.zeros(len(self.layers[-1].sums))
        for layer in self.layers[::-1]:
            reached = (layer.squares + ahead)[layer.following]
            ahead = reached.max(axis=1)
        return float(np.sqrt(ahead[0]))


@functools.lru_cache(maxsize=64)
def lattice(chain: Chain, column: tuple[float, ...], steps: int) -> Lattice:
    """Returns the lattice of a run.

    Args:
      chain: the law of a record's participations.
      column: the first column of A, without trailing zeros. Entries must not be negative, as the
        proof of the dominating pair requires.
      steps: T.

    Raises:
      ValueError: an entry is negative, or there are too many states.
    """
    if min(column) < 0:
        raise ValueError(
            "The first column of the strategy must not be negative if records take part at random, "
            f"got an entry of {min(column):.3g}. No ε is known for others."
        )
    before: _States = {}
    start = []
    for state, chance in chain.start().items():
        before[state, ()] = len(before)
        start.append(chance)
    layers: list[Layer] = []
    known: dict[object, tuple[Layer, _States]] = {}
    for step in range(steps):
        # Equal states and moves give the same layer object, so `copied` also builds it once.
        key = step == 0, step % chain.period, tuple(before)
        if key not in known:
            known[key] = _after(chain, column, step, before, None if step else start)
        layer, before = known[key]
        layers.append(layer)
    return Lattice(tuple(layers))


def _after(
    chain: Chain, column: tuple[float, ...], step: int, before: _States, start: list[float] | None
) -> tuple[Layer, _States]:
    """Returns a step's layer and its states."""
    after: _States = {}
    edges = []
    for (state, ages), place in before.items():
        older = tuple(age + 1 for age in ages if age + 1 < len(column))
        probability, taking, leaving = chain.move(step, state)
        ways = ((probability, taking, (0, *older)), (1 - probability, leaving, older))
        for chance, reached, window in ways:
            if chance > 0:
                found = after.setdefault((reached, window), len(after))
                # All states before the first step are merged into one.
                edges.append((found, 0, chance * start[place]) if start else (found, place, chance))
    if len(after) > MOST_STATES:
        raise ValueError(
            f"A record must have at most {MOST_STATES} patterns of participation within the "
            f"{len(column)} bands of the strategy, got {len(after)}. Use a strategy with fewer "
            "bands."
        )
    means = np.array([sum(column[age] for age in ages) for _, ages in after])
    return _layer(means, means**2, edges, 1 if start else len(before)), after


@functools.lru_cache(maxsize=16)
def copied(chain: Chain, column: tuple[float, ...], steps: int, copies: int) -> Lattice:
    """Returns the lattice of several independent copies, in any order."""
    single = lattice(chain, column, steps)
    before: dict[tuple[int, ...], int] = {(0,) * copies: 0}
    layers = []
    known: dict[object, tuple[Layer, dict[tuple[int, ...], int]]] = {}
    for layer in single.layers:
        key = id(layer), tuple(before)
        if key not in known:
            known[key] = _groups_after(layer, before)
        joint, before = known[key]
        layers.append(joint)
    return Lattice(tuple(layers), copies)


def _groups_after(
    layer: Layer, before: dict[tuple[int, ...], int]
) -> tuple[Layer, dict[tuple[int, ...], int]]:
    """Returns a step's layer of several copies, whose states are sorted tuples."""
    ways = [
        [(int(s), math.exp(c)) for s, c in zip(states, logs, strict=True) if c > -math.inf]
        for states, logs in zip(layer.following, layer.log_chances, strict=True)
    ]
    after: dict[tuple[int, ...], int] = {}
    edges = []
    for group, place in before.items():
        reached: dict[tuple[int, ...], float] = {(): 1.0}
        for member in group:
            grown: dict[tuple[int, ...], float] = {}
            for others, chance in reached.items():
                for state, probability in ways[member]:
                    key = tuple(sorted((*others, state)))
                    grown[key] = grown.get(key, 0.0) + chance * probability
            reached = grown
        for key, chance in reached.items():
            edges.append((after.setdefault(key, len(after)), place, chance))
    members = np.array(list(after))
    sums = layer.sums[members].sum(axis=1)
    return _layer(sums, layer.squares[members].sum(axis=1), edges, len(before)), after


def _layer(
    sums: np.ndarray, squares: np.ndarray, edges: list[tuple[int, int, float]], before: int
) -> Layer:
    """Returns the layer of transitions (state, state before, probability)."""
    rows, columns, chances = zip(*edges, strict=True)
    from scipy import sparse  # slow, and not needed for drawing batches

    move = sparse.csr_matrix((chances, (rows, columns)), (len(sums), before))
    turned = move.tocsc()
    counts = np.diff(turned.indptr)
    place = np.minimum(np.arange(counts.max()), counts[:, None] - 1) + turned.indptr[:-1, None]
    log_chances = np.log(turned.data[place])
    log_chances[np.arange(counts.max()) >= counts[:, None]] = -np.inf
    return Layer(sums, squares, move, turned.indices[place], log_chances)
