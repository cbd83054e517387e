"""Privacy events, and prices that dp_accounting lacks.

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
