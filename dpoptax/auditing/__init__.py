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
module computes bounds from whole trade-off functions, and p-values of claims: `TradeOff`,
`trade_off_curve`, `p_value_fdp`.
"""

from dpoptax._pricing.trade_off_functions import TradeOff as TradeOff
from dpoptax._pricing.trade_off_functions import approximate_trade_off as approximate_trade_off
from dpoptax._pricing.trade_off_functions import gaussian_trade_off as gaussian_trade_off
from dpoptax.auditing._audit import audit as audit
from dpoptax.auditing._audit_one_run import audit_one_run as audit_one_run
from dpoptax.auditing._audit_one_run import audit_scores as audit_scores
from dpoptax.auditing._checks import ThreatModel as ThreatModel
from dpoptax.auditing._error_curves import CanaryScores as CanaryScores
from dpoptax.auditing._error_curves import TradeOffCurve as TradeOffCurve
from dpoptax.auditing._error_curves import bootstrap_interval as bootstrap_interval
from dpoptax.auditing._error_curves import trade_off_curve as trade_off_curve
from dpoptax.auditing._families import Family as Family
from dpoptax.auditing._families import approximate_family as approximate_family
from dpoptax.auditing._families import claimed_family as claimed_family
from dpoptax.auditing._families import gaussian_family as gaussian_family
from dpoptax.auditing._game import Game as Game
from dpoptax.auditing._game import canary_gradient as canary_gradient
from dpoptax.auditing._game import canary_gradients as canary_gradients
from dpoptax.auditing._game import leaf_projections as leaf_projections
from dpoptax.auditing._game import linear_loss as linear_loss
from dpoptax.auditing._membership import MembershipReport as MembershipReport
from dpoptax.auditing._membership import membership_report as membership_report
from dpoptax.auditing._one_run import OneRunGuesses as OneRunGuesses
from dpoptax.auditing._one_run import guesses_about as guesses_about
from dpoptax.auditing._one_run import p_value_dp as p_value_dp
from dpoptax.auditing._one_run import p_value_fdp as p_value_fdp
from dpoptax.auditing._result import AuditResult as AuditResult
from dpoptax.auditing._result import Bound as Bound
from dpoptax.auditing._worst_example import WorstExample as WorstExample
from dpoptax.auditing._worst_example import searched_canary as searched_canary
from dpoptax.auditing._worst_example import worst_example as worst_example
