"""Configures nonlinear post-processing on digits; `FILE:NAME` selects one config."""

from dpoptax.training import TrainConfig
from experiments.methods import JamesStein, Muon, ShrunkMuon, SignSGD, SingularValues


def get_configs() -> dict[str, TrainConfig]:
    """Returns each method at its defaults, and both shrinkages of a running mean."""
    return {
        "singular_values": TrainConfig(method=SingularValues(), learning_rate=1.5),
        "singular_values_mean": TrainConfig(method=SingularValues(decay=0.9), learning_rate=1.5),
        "james_stein": TrainConfig(method=JamesStein(), learning_rate=1.5),
        "james_stein_mean": TrainConfig(method=JamesStein(decay=0.9), learning_rate=1.5),
        "muon": TrainConfig(method=Muon(), learning_rate=0.05),
        "shrunk_muon": TrainConfig(method=ShrunkMuon(), learning_rate=0.05),
        "sign_sgd": TrainConfig(method=SignSGD(), learning_rate=0.01),
        "sign_momentum": TrainConfig(method=SignSGD(decay=0.9), learning_rate=0.01),
    }
