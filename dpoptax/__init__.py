"""Differentially private training in JAX, as optax transformations.

`clipped_grad` sums clipped per-example gradients and `gaussian_noise` makes the sum private. A
filter such as `doppler` and any optax optimizer follow. The README shows a complete loop.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Type checkers read these imports. A program imports a name when it uses it.
    from dpoptax import accounting as accounting
    from dpoptax import auditing as auditing
    from dpoptax import columns as columns
    from dpoptax import contrib as contrib
    from dpoptax import extend as extend
    from dpoptax import filters as filters
    from dpoptax import matrix as matrix
    from dpoptax import sampling as sampling
    from dpoptax import tables as tables
    from dpoptax import users as users
    from dpoptax._clipped_grad.augmentation import augmented as augmented
    from dpoptax._clipped_grad.clipped_grad import clipped_grad as clipped_grad
    from dpoptax._clipped_grad.dropped_examples import (
        dropped_examples as dropped_examples,
    )
    from dpoptax._clipped_grad.gradient_norms import gradient_norms as gradient_norms
    from dpoptax._clipped_sum.accumulate import accumulate as accumulate
    from dpoptax._clipped_sum.clipped_sum import ClippedSum as ClippedSum
    from dpoptax._clips.clip import Clip as Clip
    from dpoptax._clips.clip import l2_clip as l2_clip
    from dpoptax._clips.clipping_functions import automatic_clip as automatic_clip
    from dpoptax._clips.clipping_functions import normalized_clip as normalized_clip
    from dpoptax._clips.clipping_functions import per_layer_clip as per_layer_clip
    from dpoptax._ghost_clipping.explain import explain as explain
    from dpoptax._information_flow.information_flow import (
        information_flow as information_flow,
    )
    from dpoptax._points.points import GradientPoints as GradientPoints
    from dpoptax._points.points import gradient_points as gradient_points
    from dpoptax._random.keys import random_key_from_os as random_key_from_os
    from dpoptax._release.chain import clip_and_noise as clip_and_noise
    from dpoptax._release.correlated import correlated_noise as correlated_noise
    from dpoptax._release.gaussian import gaussian_noise as gaussian_noise
    from dpoptax._release.read_ledger import ledgers as ledgers
    from dpoptax._support.version import __version__ as __version__
    from dpoptax.filters._disk import disk as disk
    from dpoptax.filters._kalman import adaptive_kalman as adaptive_kalman
    from dpoptax.filters._low_pass import doppler as doppler
    from dpoptax.filters._low_pass import low_pass as low_pass
    from dpoptax.filters._lp_adam import lp_adam as lp_adam
    from dpoptax.filters._pmlf import pmlf as pmlf
    from dpoptax.runs._batches import Batch as Batch
    from dpoptax.runs._privacy_plan import PrivacyPlan as PrivacyPlan
    from dpoptax.runs._private_run import PrivateRun as PrivateRun
else:
    from dpoptax._support.lazy import lazy_names

    def _elsewhere(name: str) -> str:
        if name.startswith("_"):
            return ""
        modules = [importlib.import_module(f"dpoptax.{shelf}") for shelf in ("contrib", "extend")]
        places = [module.__name__ for module in modules if hasattr(module, name)]
        return "".join(f". It is {place}.{name}" for place in places)

    __getattr__, __dir__, __all__ = lazy_names(__name__, _elsewhere)
