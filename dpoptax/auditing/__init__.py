"""Audits: attacks on a training step, and the lower bounds on ε that they prove.

A privacy claim limits how well an adversary can tell whether an example was in the data. In an
audit the adversary plants a *canary*, observes the outputs of the threat model, and guesses. The
rate of correct guesses gives, with a stated confidence, a lower bound on ε. A bound above the claim
disproves the claim and shows a bug. A bound near the claim shows that the attack is strong and the
claim tight. A bound far below the claim proves nothing about other attacks.

The audit runs the real training step: `dpoptax.clipped_grad` and the optax chain, over thousands of
runs at once, on samples of the claim's sampler. A single canary under a `PoissonSampler` is drawn
by a coin with the sampler's probability, so this case does not test the sampler itself.
`jax_privacy.auditing` computes bounds on ε from one threshold (install `dpoptax[audit]`). This
module computes bounds from whole trade-off functions, and p-values of claims: `TradeOff`,
`trade_off_curve`, `p_value_fdp`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpoptax.auditing._public_names import *  # noqa: F403

# The audits are imported on first use: they need jax_privacy and SciPy, and `_information_flow`,
# which is also in this package, does not.
if not TYPE_CHECKING:  # Type checkers read the import above instead.

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        if not name.startswith("_"):
            names = importlib.import_module("dpoptax.auditing._public_names")
            if hasattr(names, name):
                return getattr(names, name)
        raise AttributeError(f"module 'dpoptax.auditing' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = importlib.import_module("dpoptax.auditing._public_names")
    return sorted(name for name in vars(names) if not name.startswith("_"))
