"""Differentially private training in JAX, as optax transformations.

`clipped_grad` sums clipped per-example gradients and `gaussian_noise` makes the sum private. A
filter such as `doppler` and any optax optimizer follow. The README shows a complete loop.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpoptax import filters as filters
from dpoptax import matrix as matrix
from dpoptax import sampling as sampling
from dpoptax._gradients.clip.accumulate import accumulate as accumulate
from dpoptax._gradients.clip.clip import Clip as Clip
from dpoptax._gradients.clip.clip import l2_clip as l2_clip
from dpoptax._gradients.clip.clipped_sum import ClippedSum as ClippedSum
from dpoptax._gradients.clip.clipping_functions import automatic_clip as automatic_clip
from dpoptax._gradients.clip.clipping_functions import normalized_clip as normalized_clip
from dpoptax._gradients.clip.clipping_functions import per_layer_clip as per_layer_clip
from dpoptax._gradients.clipped_grad.augmentation import augmented as augmented
from dpoptax._gradients.clipped_grad.clipped_grad import clipped_grad as clipped_grad
from dpoptax._gradients.clipped_grad.dropped_examples import dropped_examples as dropped_examples
from dpoptax._gradients.clipped_grad.microbatch_tuning import (
    tune_microbatch_size as tune_microbatch_size,
)
from dpoptax._gradients.ghost_clipping.explain import explain as explain
from dpoptax._gradients.points import GradientPoints as GradientPoints
from dpoptax._gradients.points import gradient_points as gradient_points
from dpoptax._release.adaptive import adaptive_clip as adaptive_clip
from dpoptax._release.adaptive import adaptive_gaussian_noise as adaptive_gaussian_noise
from dpoptax._release.correlated import correlated_noise as correlated_noise
from dpoptax._release.gaussian import clip_and_noise as clip_and_noise
from dpoptax._release.gaussian import gaussian_noise as gaussian_noise
from dpoptax._release.information_flow.information_flow import information_flow as information_flow
from dpoptax._release.random.keys import random_key_from_os as random_key_from_os
from dpoptax._release.read_ledger import ledgers as ledgers
from dpoptax.filters._disk import disk as disk
from dpoptax.filters._doppler import doppler as doppler
from dpoptax.filters._kalman import adaptive_kalman as adaptive_kalman
from dpoptax.filters._low_pass import low_pass as low_pass
from dpoptax.filters._lp_adam import lp_adam as lp_adam
from dpoptax.filters._pmlf import pmlf as pmlf
from dpoptax.sampling._batches import Batch as Batch

if TYPE_CHECKING:
    from dpoptax import accounting as accounting
    from dpoptax import auditing as auditing
    from dpoptax import contrib as contrib
    from dpoptax import extend as extend
    from dpoptax import tables as tables
    from dpoptax import users as users
    from dpoptax.accounting._privacy_plan import PrivacyPlan as PrivacyPlan

    __version__: str

# Imported on first use: some of them need dp_accounting or SciPy, which take longer to import than
# the rest of the package.
_LAZY = (
    "accounting",
    "auditing",
    "contrib",
    "extend",
    "tables",
    "users",
)


if not TYPE_CHECKING:  # Type checkers read the imports above instead.

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("dpoptax")
        if name == "PrivacyPlan":
            return importlib.import_module("dpoptax.accounting._privacy_plan").PrivacyPlan
        if name in _LAZY:
            return importlib.import_module(f"dpoptax.{name}")
        shelves = ("contrib", "extend") if not name.startswith("_") else ()
        modules = [importlib.import_module(f"dpoptax.{shelf}") for shelf in shelves]
        places = [
            f". It is {module.__name__}.{name}" for module in modules if hasattr(module, name)
        ]
        raise AttributeError(f"module 'dpoptax' has no attribute {name!r}{''.join(places)}")


def __dir__() -> list[str]:
    imported = {"Any", "TYPE_CHECKING", "importlib"}
    return sorted({*globals(), *_LAZY, "PrivacyPlan"} - imported)
