"""Checks the options of audits, states the claim and checks the observations."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from dpoptax import accounting
from dpoptax._pricing.trade_off_functions import approximate_trade_off
from dpoptax._release.ledger import count_releases, is_ledger
from dpoptax._release.read_ledger import ledgers
from dpoptax._support.tree import PyTree
from dpoptax.auditing._game import Game, draws_alone
from dpoptax.auditing._result import claimed_family, gaussian_family
from dpoptax.sampling import Sampler

ThreatModel = Literal["white-box", "last-iterate"]


def check_options(
    trials: int, confidence: float, threat_model: str, name: str = "`trials`"
) -> None:
    """Raises if an option of an audit is out of range."""
    if not trials >= 64:
        raise ValueError(
            f"{name} must be at least 64, got {trials}. A bound above ε needs more than e^ε trials."
        )
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"`confidence` must be in (0.5, 1), got {confidence}.")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(
            f"`threat_model` must be 'white-box' or 'last-iterate', got {threat_model!r}."
        )


def check_seen(*seen: np.ndarray, projected: bool) -> None:
    """Raises if features or scores are not finite or do not depend on the noise.

    A custom `observe` may be the same in all runs, because the noise hides the rest. A projection
    on a canary's contribution may not.
    """
    if not all(np.isfinite(values).all() for values in seen):
        raise ValueError(
            "The attacker's observations must be finite, but a release was refused or the training "
            "diverged. Audit a run that stays finite, such as with a smaller learning rate."
        )
    first = seen[0][0]
    if projected and all((values == first).all() for values in seen):
        raise ValueError(
            "The projections on the canaries' contributions do not depend on the noise: "
            "the canaries add nothing to the clipped sum, or all updates are zero. Pass canaries "
            "with finite gradients that are not zero, and a transform with outputs."
        )


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
