"""Finds the code of the user that called the package, for warnings."""

import sys


def level_of_caller() -> int:
    """Returns the `stacklevel` at which the calling function warns the user.

    JAX calls the package while it traces, so its frames are passed over as well.
    """
    frame, level = sys._getframe(1), 1
    inside = "dpoptax", "jax"
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    return level
