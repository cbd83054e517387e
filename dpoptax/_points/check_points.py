"""Checks that gradients were taken at the points that an optimizer's state asks for.

If they were not, a method such as `disk` has no effect. The code of the points is static in a
`ClippedSum`, and an array in the state of the noise stage that released the sum.
"""

from collections.abc import Sequence
from typing import Any

import jax

from dpoptax._points.points import ReferenceState, TrackIteratesState, fits
from dpoptax._support.tree import PyTree

# States that `gradient_points` reads.
Tracker = TrackIteratesState | ReferenceState

POINTS_REMEDY = (
    "otherwise it has no effect. Call `grad_fn(dpoptax.gradient_points(opt_state, params), batch, "
    "mask)` with the state of the whole chain. `dpoptax.clip_and_noise` supports only gradients at "
    "the parameters."
)


def unused_trackers(opt_state: PyTree, releases: Sequence[tuple[tuple[Any, ...], int]]) -> str:
    """Returns the places of trackers whose points no release used; an empty text for none.

    A tracker is compared with the noise stages of its chain, the smallest subtree that has one.

    Args:
      opt_state: the optimizer's state, or any pytree that contains it.
      releases: the path in `opt_state` and the code of the points for each noise stage.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_tracker)
    unused = []
    for path, tracker in leaves:
        if not (_is_tracker(tracker) and releases):
            continue
        shared = [_shared_length(path, stage) for stage, _ in releases]
        codes = {code for n, (_, code) in zip(shared, releases, strict=True) if n == max(shared)}
        if not any(fits(tracker, code) for code in codes):
            unused.append(f"opt_state{jax.tree_util.keystr(path)}")
    return ", ".join(unused)


def _is_tracker(x: object) -> bool:
    return isinstance(x, Tracker)


def _shared_length(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """Returns the length of the common beginning of two paths."""
    pairs = zip(path, other, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(path), len(other)))
