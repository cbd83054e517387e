"""States the claim that an audit tests."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpoptax import accounting
from dpoptax._pricing.trade_off_functions import approximate_trade_off
from dpoptax._release.ledger import count_releases, is_ledger
from dpoptax._release.read_ledger import ledgers
from dpoptax._support.tree import PyTree
from dpoptax.auditing._families import claimed_family, gaussian_family
from dpoptax.auditing._game import Game, draws_alone
from dpoptax.sampling import Sampler


def claim_of(
    sampler: Sampler, opt_state: Callable[[], PyTree], delta: float, epsilon: float | None
) -> dict[str, Any]:
    """Returns `claimed_epsilon`, `claimed` and `family` of an `AuditResult`.

    The claim is that of the ledger and the sampler after the run, or of `epsilon`.
    """
    gaussian = gaussian_family() if sampler.sampling_probability == 1.0 else None
    if epsilon is not None:
        claimed = approximate_trade_off(epsilon, delta)
        return {"claimed_epsilon": float(epsilon), "claimed": claimed, "family": gaussian}
    spent = opt_state()
    family = claimed_family(spent, sampler)
    # Otherwise the price is only an upper bound on ε, and a refuted value may exceed the true ε.
    # This is the case if a record replaces another, as in batches that are cut or of a fixed size:
    # the price assumes that the two records contribute opposite vectors.
    exact = draws_alone(sampler) and not any(x.mechanism.strategy for x in ledgers(spent))
    return {
        "claimed_epsilon": float(accounting.guarantee(spent, sampler).epsilon(delta)),
        "claimed": family.trade_off(1.0),
        "family": gaussian or (family if exact else None),
    }


def state_after(game: Game, releases: jax.Array) -> PyTree:
    """Returns the optimizer state with the counts of releases and refusals of a run."""
    seen = iter(np.asarray(releases).tolist())

    def spent(leaf: Any) -> Any:
        return count_releases(leaf, *next(seen)) if is_ledger(leaf) else leaf

    return jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_ledger)
