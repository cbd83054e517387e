"""DP-SGD whose noise falls or rises over a run, on the handwritten digits: `FILE:NAME` is one."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, DecayingNoise

RATIOS = 0.5, 1.5, 2.0, 4.0


def get_configs() -> dict[str, TrainConfig]:
    """Constant noise, and noise of several ratios of the first phase's to the last's."""
    methods = {"constant": DPSGD()} | {f"ratio_{r:g}": DecayingNoise(ratio=r) for r in RATIOS}
    return {name: TrainConfig(method=method, learning_rate=1.5) for name, method in methods.items()}
