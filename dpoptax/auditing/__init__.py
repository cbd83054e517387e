"""Audits: attacks on a training step, and the lower bounds on ε that they prove.

A privacy claim limits how well an adversary can tell whether an example was in the data. In an
audit the adversary plants a *canary*, observes the outputs of the threat model, and guesses. The
rate of correct guesses gives, with a stated confidence, a lower bound on ε. A bound above the claim
disproves the claim and shows a bug. A bound near the claim shows that the attack is strong and the
claim tight. A bound far below the claim proves nothing about other attacks.

The audit runs the real training step: `dpoptax.clipped_grad` and the optax chain, over thousands of
runs at once, on samples of the claim's sampler. A single canary under a `PoissonSampler` is drawn
by a coin with the sampler's probability, so this case does not test the sampler itself.
`jax_privacy.auditing` computes bounds on ε from one threshold (install `dpoptax[audit]`). This
module computes bounds from whole trade-off functions: `TradeOff`, `trade_off_curve`.

`check_batches` and `check_noise` need only row numbers and releases, from a run of any library.
Draws of the claimed sampler, and new noise of the claimed size, raise an alarm with a probability
of at most 1 in 1,000.
"""

from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off, gaussian_trade_off
from dpoptax.auditing._audit import audit
from dpoptax.auditing._audit_one_run import audit_one_run, audit_scores
from dpoptax.auditing._check_batches import BatchReport, check_batches
from dpoptax.auditing._check_noise import NoiseReport, check_noise
from dpoptax.auditing._error_curves import TradeOffCurve, trade_off_curve
from dpoptax.auditing._exact_scores import Finding
from dpoptax.auditing._game import Game, canary_gradient, leaf_projections, linear_loss
from dpoptax.auditing._membership import MembershipReport, membership_report
from dpoptax.auditing._result import AuditResult, Bound, ThreatModel
from dpoptax.auditing._worst_example import WorstExample, searched_canary, worst_example

__all__ = [
    "AuditResult", "BatchReport", "Bound", "Finding", "Game", "MembershipReport",
    "NoiseReport", "ThreatModel", "TradeOff", "TradeOffCurve", "WorstExample",
    "approximate_trade_off", "audit", "audit_one_run", "audit_scores",
    "canary_gradient", "check_batches", "check_noise",
    "gaussian_trade_off", "leaf_projections", "linear_loss", "membership_report",
    "searched_canary", "trade_off_curve", "worst_example",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
