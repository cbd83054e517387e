"""Checks that gradients were taken at the points that an optimizer's state asks for.

If they were not, a method such as `disk` has no effect. The origin of the points is static in a
`ClippedSum`, and its code is an array in the state of the noise stage that released the sum.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax

from dpoptax._gradients.points import Origin, ReferenceState, TrackIteratesState, origin_of
from dpoptax._support.tree import PyTree

# States that `gradient_points` reads.
Tracker = TrackIteratesState | ReferenceState

# The lowest bits of a code. The others are a checksum of the coefficients of the points.
# Checkpoints hold codes, so the third bit, which is not used, keeps its place.
_KNOWN, _REFERENCE, _FLAGS = 1, 2, 3

POINTS_REMEDY = (
    "otherwise it has no effect. Call `grad_fn(dpoptax.gradient_points(opt_state, params), batch, "
    "mask)` with the state of the whole chain. `dpoptax.clip_and_noise` supports only gradients at "
    "the parameters."
)


def origin_code(origin: Origin | None) -> int:
    """Returns an origin as a uint32, which is part of the format of checkpoints.

    It is 0 if the origin is unknown, as for points made by hand.
    """
    if origin is None:
        return 0
    # Adding 0.0 makes −0.0 positive.
    rows = [[(c + 0.0).hex() for c in row] for row in (*origin.rows, origin.tangent_row or ())]
    text = f"points/1 {len(origin.rows)} {rows}"
    flags = _KNOWN | _REFERENCE * origin.reference
    return zlib.crc32(text.encode()) >> _FLAGS << _FLAGS | flags


def unused_trackers(opt_state: PyTree, releases: Sequence[tuple[tuple[Any, ...], int]]) -> str:
    """Returns the places of trackers whose points no release used; an empty text for none.

    A tracker is compared with the noise stages of its chain, the smallest subtree that has one.

    Args:
      opt_state: the optimizer's state, or any pytree that contains it.
      releases: the path in `opt_state` and the origin's code for each noise stage. Code 0 fits
        every tracker.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_tracker)
    unused = []
    for path, tracker in leaves:
        if not (_is_tracker(tracker) and releases):
            continue
        shared = [_shared_length(path, stage) for stage, _ in releases]
        codes = {code for n, (_, code) in zip(shared, releases, strict=True) if n == max(shared)}
        if not any(code == 0 or _fits(tracker, code) for code in codes):
            unused.append(f"opt_state{jax.tree_util.keystr(path)}")
    return ", ".join(unused)


def _is_tracker(x: object) -> bool:
    return isinstance(x, Tracker)


def _shared_length(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """Returns the length of the common beginning of two paths."""
    pairs = zip(path, other, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(path), len(other)))


def _fits(tracker: Tracker, code: int) -> bool:
    if isinstance(tracker, ReferenceState):
        return bool(code & _REFERENCE)
    return code >> _FLAGS == origin_code(origin_of(tracker)) >> _FLAGS
