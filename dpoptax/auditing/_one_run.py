"""Bounds by one run with many canaries, from the numbers of correct guesses."""

import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor, Explicit

_FEWEST = 16


def one_run_bound(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    confidence: float,
    gaussian: bool = False,
) -> float:
    """Returns the largest ε that the guesses about the canaries of one run refute.

    The attacker guesses "in" for the highest scores and "out" for as many of the lowest. Six
    numbers of guesses share the failure probability, from half of the canaries down to a 64th of
    them, and at least 16.

    Args:
      scores: (canaries,), high for canaries that the attacker guesses to be in.
      included: (canaries,), True for canaries that were in.
      delta: δ of the bound.
      confidence: the confidence of the bound.
      gaussian: whether to assume a Gaussian mechanism.

    Source: Steinke, Nasr, Jagielski, 2023, algorithm 1, with k₊ = k₋; for a Gaussian mechanism,
    Mahloujifar, Melis, Chaudhuri, 2024. Both as implemented in jax_privacy.
    """
    size = len(scores)
    # An order of equal scores by position could depend on the coins, and so could a fixed shuffle.
    # A random order is the attacker's own randomness.
    order = np.lexsort((np.random.default_rng().random(size), scores))
    places = np.empty(size)
    # From the lowest to the highest score, with sizes that all differ.
    places[order] = np.arange(size) - size / 2 + 0.25
    right, sizes = included == (places > 0), np.abs(places)
    if right.all() or not right.any():
        right[np.argmin(sizes)] ^= True  # jax_privacy needs both; this one is never guessed about
    auditor = CanaryScoreAuditor(sizes[right], sizes[~right])
    bound = auditor.epsilon_one_run_fdp if gaussian else auditor.epsilon_one_run
    numbers = sorted({max(_FEWEST, size // 2**i) for i in range(1, 7)})
    least = np.sort(sizes)[[-number for number in numbers]]
    significance = (1 - confidence) / len(numbers)
    return max(
        float(bound(significance, delta, threshold_strategy=Explicit(float(each))))
        for each in least
    )
