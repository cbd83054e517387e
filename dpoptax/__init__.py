"""Differentially private training in JAX: optax transformations that win back accuracy from noise.

A step, read left to right: `gradient_points` says where gradients are taken, `clipped_grad` sums
the clipped per-example gradients, `gaussian_noise` makes the sum private, a filter such as
`doppler` and any optax optimizer follow. See the README for a whole loop.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from dpoptax._bookkeeping.explain import Explanation as Explanation
from dpoptax._bookkeeping.explain import explain as explain
from dpoptax._clipped_grad.augmentation import augmented as augmented
from dpoptax._clipped_grad.clipped_grad import clipped_grad as clipped_grad
from dpoptax._clipped_grad.dropped import dropped_examples as dropped_examples
from dpoptax._clipped_grad.microbatches import in_microbatches as in_microbatches
from dpoptax._clipped_grad.tuning import tune_microbatch_size as tune_microbatch_size
from dpoptax._clips.accumulate import accumulate as accumulate
from dpoptax._clips.base import Clip as Clip
from dpoptax._clips.base import l2_clip as l2_clip
from dpoptax._clips.clipped_sum import ClippedSum as ClippedSum
from dpoptax._clips.clipped_sum import assert_clipped as assert_clipped
from dpoptax._clips.curves import automatic_clip as automatic_clip
from dpoptax._clips.curves import normalized_clip as normalized_clip
from dpoptax._clips.curves import per_layer_clip as per_layer_clip
from dpoptax._clips.curves import psac_clip as psac_clip
from dpoptax._clips.per_example import clip_per_example as clip_per_example
from dpoptax._clips.reference import track_reference as track_reference
from dpoptax._information_flow.flow import InformationFlow as InformationFlow
from dpoptax._information_flow.flow import Shown as Shown
from dpoptax._information_flow.flow import information_flow as information_flow
from dpoptax._maps import Diagonal as Diagonal
from dpoptax._maps import LinearMap as LinearMap
from dpoptax._maps import LinearMapState as LinearMapState
from dpoptax._maps import Sides as Sides
from dpoptax._methods.disk import disk as disk
from dpoptax._methods.doppler import doppler as doppler
from dpoptax._methods.fir import AdaptiveFirState as AdaptiveFirState
from dpoptax._methods.fir import adaptive_fir as adaptive_fir
from dpoptax._methods.kalman import AdaptiveKalmanState as AdaptiveKalmanState
from dpoptax._methods.kalman import adaptive_kalman as adaptive_kalman
from dpoptax._methods.kalman import kalman_gain as kalman_gain
from dpoptax._methods.kronecker import kronecker_factors as kronecker_factors
from dpoptax._methods.linear_map import linear_map as linear_map
from dpoptax._methods.low_pass import LowPassState as LowPassState
from dpoptax._methods.low_pass import low_pass as low_pass
from dpoptax._methods.lp_adam import ScaleByLpAdamState as ScaleByLpAdamState
from dpoptax._methods.lp_adam import adam_bc as adam_bc
from dpoptax._methods.lp_adam import lp_adam as lp_adam
from dpoptax._methods.lp_adam import scale_by_lp_adam as scale_by_lp_adam
from dpoptax._methods.muon import scale_by_shrunk_muon as scale_by_shrunk_muon
from dpoptax._methods.muon import shrunk_muon as shrunk_muon
from dpoptax._methods.pmlf import inner_outer as inner_outer
from dpoptax._methods.pmlf import pmlf as pmlf
from dpoptax._methods.scale_then_privatize import (
    ScaleThenPrivatizeState as ScaleThenPrivatizeState,
)
from dpoptax._methods.scale_then_privatize import scale_then_privatize as scale_then_privatize
from dpoptax._methods.shrinkage import james_stein as james_stein
from dpoptax._methods.shrinkage import singular_value_shrinkage as singular_value_shrinkage
from dpoptax._noise.adaptive import AdaptiveNoiseState as AdaptiveNoiseState
from dpoptax._noise.adaptive import CountedGradient as CountedGradient
from dpoptax._noise.adaptive import adaptive_clip as adaptive_clip
from dpoptax._noise.adaptive import adaptive_gaussian_noise as adaptive_gaussian_noise
from dpoptax._noise.correlated import CorrelatedNoiseState as CorrelatedNoiseState
from dpoptax._noise.correlated import correlated_noise as correlated_noise
from dpoptax._noise.fixed_point import fixed_point_grid as fixed_point_grid
from dpoptax._noise.gaussian import GaussianNoiseState as GaussianNoiseState
from dpoptax._noise.gaussian import clip_and_noise as clip_and_noise
from dpoptax._noise.gaussian import gaussian_noise as gaussian_noise
from dpoptax._noise.gaussian import release_stddev as release_stddev
from dpoptax._noise.geodp import HypersphericalClip as HypersphericalClip
from dpoptax._noise.geodp import geodp as geodp
from dpoptax._noise.geodp import hyperspherical_clip as hyperspherical_clip
from dpoptax._noise.keys import random_key_from_os as random_key_from_os
from dpoptax._noise.ledger import Mechanism as Mechanism
from dpoptax._noise.reading import Ledger as Ledger
from dpoptax._noise.reading import ledgers as ledgers
from dpoptax._points import GradientPoints as GradientPoints
from dpoptax._points import ReferenceState as ReferenceState
from dpoptax._points import TrackIteratesState as TrackIteratesState
from dpoptax._points import gradient_points as gradient_points
from dpoptax._points import track_iterates as track_iterates

if TYPE_CHECKING:
    from dpoptax import accounting as accounting
    from dpoptax import filters as filters
    from dpoptax import matrix as matrix
    from dpoptax import sampling as sampling
    from dpoptax import selection as selection
    from dpoptax import spectrum as spectrum
    from dpoptax import tables as tables
    from dpoptax import users as users

__version__ = "0.1.0"

# They need dp_accounting or scipy, which take longer to import than the rest of the package, or are
# not for everyone; each is imported when its name is first used.
_LAZY = (
    "accounting",
    "filters",
    "matrix",
    "sampling",
    "selection",
    "spectrum",
    "tables",
    "users",
)


if not TYPE_CHECKING:  # A type checker knows the names from above, and that there are no others.

    def __getattr__(name: str) -> ModuleType:
        if name in _LAZY:
            return importlib.import_module(f"dpoptax.{name}")
        raise AttributeError(
            f"module 'dpoptax' has no attribute {name!r}; it may be in dpoptax.{', '.join(_LAZY)}"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
