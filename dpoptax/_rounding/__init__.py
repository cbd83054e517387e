"""Bounds of norms and sums that include rounding, and sums that keep within them.

`integer_sums` is imported on first use, as an attribute of the package: lookups and grids need it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._rounding import integer_sums as integer_sums
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
