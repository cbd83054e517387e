"""Checks the options of audits and the attacker's observations."""

from typing import Literal

import numpy as np

ThreatModel = Literal["white-box", "last-iterate"]


def check_options(trials: int, confidence: float, threat_model: str) -> None:
    """Raises if an option of an audit is out of range."""
    if not trials >= 64:
        raise ValueError(
            f"`trials` must be at least 64, got {trials}. A bound above ε needs more than "
            "e^ε trials."
        )
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"`confidence` must be in (0.5, 1), got {confidence}.")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(
            f"`threat_model` must be 'white-box' or 'last-iterate', got {threat_model!r}."
        )


def check_seen(*seen: np.ndarray, projected: bool) -> None:
    """Raises if features or scores are not finite or do not depend on the noise.

    A custom `observe` may be the same in all runs, because the noise hides the rest. A projection
    on a canary's contribution may not.
    """
    if not all(np.isfinite(values).all() for values in seen):
        raise ValueError(
            "The attacker's observations must be finite, but a release was refused or the training "
            "diverged. Audit a run that stays finite, such as with a smaller learning rate."
        )
    first = seen[0][0]
    if projected and all((values == first).all() for values in seen):
        raise ValueError(
            "The projections on the canaries' contributions do not depend on the noise: "
            "the canaries add nothing to the clipped sum, or all updates are zero. Pass canaries "
            "with finite gradients that are not zero, and a transform with outputs."
        )
