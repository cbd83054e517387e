"""Privacy accounting: the ε of a run, and runs that meet a given ε.

In each of `steps` steps, the mechanism releases a clipped sum over a sampled batch plus Gaussian
noise. The standard deviation of the noise is `noise_multiplier` times the clipping bound C. Filters
and optimizers after it are post-processing and cost nothing. Multipliers are relative to C under
every neighboring relation: if a replaced record changes the sum by 2C, the accounting doubles the
sensitivity.

Accountants:

* "pld" (default) composes privacy loss distributions numerically and rounds ε up.
* "rdp" composes Rényi divergences. It is faster and looser, and does not price random allocation.

Every ε is an upper bound by a proof. None is estimated from random draws.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._pricing.checks import Accountant as Accountant
    from dpoptax._pricing.custom_events import StatedDpEvent as StatedDpEvent
    from dpoptax._pricing.privacy_event import PrivacyEvent as PrivacyEvent
    from dpoptax._pricing.trade_off_functions import TradeOff as TradeOff
    from dpoptax.accounting import selection as selection
    from dpoptax.accounting._calibration import calibrate as calibrate
    from dpoptax.accounting._guarantee import Guarantee as Guarantee
    from dpoptax.accounting._runs import guarantee as guarantee
    from dpoptax.accounting._runs import planned_guarantee as planned_guarantee
    from dpoptax.accounting._suggestion import PlanOption as PlanOption
    from dpoptax.accounting._suggestion import PlanSuggestion as PlanSuggestion
    from dpoptax.accounting._suggestion import suggest_plan as suggest_plan
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
