"""Privacy accounting: the epsilon of a run, and the run that fits an epsilon.

The mechanism is a clipped sum over a sampled batch plus Gaussian noise of standard deviation
`noise_multiplier` times the clip bound, `steps` times over; filters and optimizers after it are
post-processing and cost nothing. Multipliers are relative to the clip bound C, whatever the
neighboring relation: where a record is replaced and the sum moves by 2 C, the doubling is done
here.

Accountants: "pld" (default) composes privacy loss distributions numerically and rounds against
the user; "rdp" composes Renyi divergences: faster, and looser; "monte_carlo" draws privacy losses
of a whole run whose records take part by chance, with noise that may be correlated
(`RandomAllocationSampler`, `MinSeparationSampler`), and states an upper confidence bound: delta has
room for the probability that it is wrong. Its draws are functions of fixed numbers, so that the
same question has the same answer. The other two price such a run with correlated noise as if
nobody knew of a chance: as one Gaussian of the greatest sensitivity.
"""

from dpoptax._pricing.checks import Accountant as Accountant
from dpoptax._pricing.trade_off_functions import TradeOff as TradeOff
from dpoptax.accounting import selection as selection
from dpoptax.accounting._calibration import calibrate_batch_size as calibrate_batch_size
from dpoptax.accounting._calibration import calibrate_noise_multiplier as calibrate_noise_multiplier
from dpoptax.accounting._calibration import calibrate_steps as calibrate_steps
from dpoptax.accounting._guarantee import Guarantee as Guarantee
from dpoptax.accounting._runs import epsilon as epsilon
from dpoptax.accounting._runs import epsilon_spent as epsilon_spent
from dpoptax.accounting._runs import guarantee as guarantee
from dpoptax.accounting._runs import planned_guarantee as planned_guarantee
from dpoptax.accounting._suggestion import PlanOption as PlanOption
from dpoptax.accounting._suggestion import PlanSuggestion as PlanSuggestion
from dpoptax.accounting._suggestion import suggest_plan as suggest_plan
