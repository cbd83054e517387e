"""States the claim that an audit tests."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpoptax import accounting
from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off
from dpoptax._release.ledger import count_releases, is_ledger
from dpoptax._release.read_ledger import ledgers
from dpoptax._support.tree import PyTree
from dpoptax.auditing._families import Family, claimed_family, gaussian_family
from dpoptax.auditing._game import Game, draws_alone
from dpoptax.sampling import Sampler


class Claim(NamedTuple):
    """Claim of a run, and the family of mechanisms of the same kind."""

    epsilon: float
    trade_off: TradeOff
    family: Family | None

    @classmethod
    def of(
        cls, sampler: Sampler, opt_state: Callable[[], PyTree], delta: float, epsilon: float | None
    ) -> "Claim":
        """Returns the claim of the ledger and the sampler after the run, or of `epsilon`."""
        gaussian = gaussian_family() if sampler.sampling_probability == 1.0 else None
        if epsilon is not None:
            return cls(float(epsilon), approximate_trade_off(epsilon, delta), gaussian)
        spent = opt_state()
        epsilon = float(accounting.guarantee(spent, sampler).epsilon(delta))
        family = claimed_family(spent, sampler)
        # Otherwise the price is only an upper bound on ε, and a refuted value may exceed the true
        # ε. This is the case if a record replaces another, as in batches that are cut or of a fixed
        # size: the price assumes that the two records contribute opposite vectors.
        exact = draws_alone(sampler) and not any(
            ledger.mechanism.strategy for ledger in ledgers(spent)
        )
        return cls(epsilon, family.trade_off(1.0), gaussian or (family if exact else None))


def state_after(game: Game, releases: jax.Array) -> PyTree:
    """Returns the optimizer state with the counts of releases and refusals of a run."""
    seen = iter(np.asarray(releases).tolist())

    def spent(leaf: Any) -> Any:
        return count_releases(leaf, *next(seen)) if is_ledger(leaf) else leaf

    return jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_ledger)
