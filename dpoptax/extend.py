"""Building blocks for new methods: points, clips, a checked chain, and state types.

A training loop does not need them. `docs/guides/extend.md` builds a method from them.
"""

from dpoptax._clipped_grad.microbatches import in_microbatches
from dpoptax._clipped_sum.clip_per_example import clip_per_example
from dpoptax._clipped_sum.clipped_sum import trust_clipped
from dpoptax._ghost_clipping.explain import Explanation
from dpoptax._information_flow.information_flow import InformationFlow, Shown
from dpoptax._points.points import track_iterates
from dpoptax._release.chain import chain
from dpoptax._release.fixed_point import fixed_point_grid
from dpoptax._release.gaussian import noise_stddev
from dpoptax._release.ledger import Mechanism
from dpoptax._release.read_ledger import Ledger
from dpoptax.contrib._adaptive import CountedGradient
from dpoptax.filters._lp_adam import scale_by_lp_adam
from dpoptax.runs._batches import read_ahead, read_sharded

__all__ = [
    "CountedGradient", "Explanation", "InformationFlow", "Ledger", "Mechanism", "Shown", "chain",
    "clip_per_example", "fixed_point_grid", "in_microbatches", "noise_stddev", "read_ahead",
    "read_sharded", "scale_by_lp_adam", "track_iterates", "trust_clipped",
]  # fmt: skip
