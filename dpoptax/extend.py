"""Building blocks for new methods: points, clips, a checked chain, and state types.

A training loop does not need them. `docs/guides/extend.md` builds a method from them.
"""

from dpoptax._gradients.clip.clip_per_example import clip_per_example as clip_per_example
from dpoptax._gradients.clip.clipped_sum import trust_clipped as trust_clipped
from dpoptax._gradients.clipped_grad.microbatches import in_microbatches as in_microbatches
from dpoptax._gradients.ghost_clipping.explain import Explanation as Explanation
from dpoptax._gradients.points import track_iterates as track_iterates
from dpoptax._gradients.track_reference import track_reference as track_reference
from dpoptax._release.adaptive import CountedGradient as CountedGradient
from dpoptax._release.chain import chain as chain
from dpoptax._release.fixed_point import fixed_point_grid as fixed_point_grid
from dpoptax._release.gaussian import noise_stddev as noise_stddev
from dpoptax._release.information_flow.information_flow import InformationFlow as InformationFlow
from dpoptax._release.information_flow.information_flow import Shown as Shown
from dpoptax._release.ledger import Mechanism as Mechanism
from dpoptax._release.read_ledger import Ledger as Ledger
from dpoptax.filters._lp_adam import scale_by_lp_adam as scale_by_lp_adam
from dpoptax.sampling._batches import read_ahead as read_ahead
from dpoptax.sampling._batches import read_sharded as read_sharded
