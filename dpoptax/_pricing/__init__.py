"""Privacy events, and prices that dp_accounting lacks.

`guarantee(opt_state, sampler).epsilon(delta)` leads from a ledger to ε by these functions:

    _release.read_ledger   read_ledgers             the releases of each noise stage
    accounting._run_event  spent_event, event_of    the event of a run, by stages of noise
    sampling, matrix       dp_event                 the event of steps with the same noise
    events, custom_events  poisson_event, …         the same, in terms of dp_accounting
    accounting._run_event  run_event                that event as a `privacy_event`
    accountants            epsilon_of               its price, under "rdp" by `renyi`, or by:
    events                 without_truncation       what δ covers, apart
    privacy_losses         pairs_of                 the privacy loss of each part
    composition            composed_epsilon         ε of all steps together

The modules below are imported on first use, as attributes of the package. Drawing batches needs no
events, and most runs need no rare prices.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._pricing import accountants as accountants
    from dpoptax._pricing import curves as curves
    from dpoptax._pricing import custom_events as custom_events
    from dpoptax._pricing import derived_curves as derived_curves
    from dpoptax._pricing import events as events
    from dpoptax._pricing import privacy_event as privacy_event
    from dpoptax._pricing import renyi as renyi
    from dpoptax._pricing import several_records as several_records
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
