"""Building blocks for new methods: points, linear maps, clips, and state types.

A training loop does not need them. `docs/guides/extend.md` builds a method from them.
"""

from dpoptax._clip.clip_per_example import clip_per_example as clip_per_example
from dpoptax._clip.clipped_sum import trust_clipped as trust_clipped
from dpoptax._clipped_grad.microbatches import in_microbatches as in_microbatches
from dpoptax._ghost_clipping.explain import Explanation as Explanation
from dpoptax._information_flow.information_flow import InformationFlow as InformationFlow
from dpoptax._information_flow.information_flow import Shown as Shown
from dpoptax._linear_map import Diagonal as Diagonal
from dpoptax._linear_map import LinearMap as LinearMap
from dpoptax._linear_map import Sides as Sides
from dpoptax._methods.gradient_map import linear_map as linear_map
from dpoptax._methods.lp_adam import scale_by_lp_adam as scale_by_lp_adam
from dpoptax._methods.track_reference import track_reference as track_reference
from dpoptax._noise.adaptive import CountedGradient as CountedGradient
from dpoptax._noise.fixed_point import fixed_point_grid as fixed_point_grid
from dpoptax._noise.gaussian import noise_stddev as noise_stddev
from dpoptax._noise.ledger import Mechanism as Mechanism
from dpoptax._noise.read_ledger import Ledger as Ledger
from dpoptax._points import track_iterates as track_iterates
