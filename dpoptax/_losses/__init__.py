"""Traces and checks a loss, and finds operations that combine parameters with data.

`read_program.read_program` is the entry point. For a dense layer `y = x @ w + b` with `x` of shape
(R,), `w` of shape (R, D) and `b` of shape (D,), the types are:

- `DerivedValue`: a value computed only from parameters and constants, such as `w` and `b`. It is
  the same for all examples. If it is a part of a parameter, a `View` says which entries it holds.
- `PrivateValue`: a value that may depend on the example, such as `x` and `y`.
- `Use`: an operation on a derived and a private value, here `x @ w`. Its `Rule` (`Dot`) maps
  operand and cotangent to factors, and its `FactorLayout` reads `w` as (K, R, D) with K = 1.
- `Program`: the steps of the loss and all its uses. `b` has no use. Because it is added to data, it
  is opaque, and automatic differentiation gives its per-example gradient.

The modules below are imported on first use, as attributes of the package: a loss needs those of its
operations.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._losses import derived_views as derived_views
    from dpoptax._losses import entry_rules as entry_rules
    from dpoptax._losses import example_separation as example_separation
    from dpoptax._losses import rules as rules
    from dpoptax._losses import views as views
    from dpoptax._losses import zero_gradients as zero_gradients
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
