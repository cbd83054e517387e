"""Configures GeoDP, Tables II (MNIST, CNN) and III (CIFAR-10, ResNet).

Names are TABLE/sigma-S/METHOD-BATCH. sigma-0 is the noise-free row of the tables: here clipped
gradients of the largest batch without noise. The rows with importance sampling (IS) and selective
updates (SUR) are left out, because they need other samplers. C = 0.1 (section VI-A), 20 epochs
(VI-D). Each result is a mean over 100 repetitions (VI-A), here one for each seed (`--seed 0` to
`--seed 99`).

Not stated, and assumed: the learning rate, 10; the stem, widths and normalization of the residual
network, here 16, 32, 64 channels and groups. Each of its three blocks has the two convolutions and
the single ReLU of section VI-A. The paper calls the CNN's activation softmax. Here softmax is the
activation of the output, and the hidden layers of the usual network with 21,840 parameters have
ReLU.

The tables state σ and no ε; figure_5.py discusses section VI-B on ε. For DP, the trainer reports
the ε that σ implies over all steps, at δ = 1e-5. For GeoDP it reports no ε, because no proof
exists. At σ = 0.1 and 0.01 that ε gives no protection, and only "pld" can compute it.
"""

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, GeoDP, Method

ROWS: dict[str, tuple[Method, int, str]] = {
    "dp-8192": (DPSGD(), 8192, "l2"),
    "dp-16384": (DPSGD(), 16_384, "l2"),
    "dp_auto_s-16384": (DPSGD(), 16_384, "auto_s"),
    "dp_psac-16384": (DPSGD(), 16_384, "psac"),
    "geodp_0.1-16384": (GeoDP(0.1), 16_384, "l2"),
    "geodp_0.1_auto_s-16384": (GeoDP(0.1), 16_384, "auto_s"),
    "geodp_0.1_psac-16384": (GeoDP(0.1), 16_384, "psac"),
}
"""Method, batch size and clip of the rows that both tables have."""

TABLES: dict[str, tuple[str, str, tuple[float, float], dict[str, tuple[Method, int, str]]]] = {
    "table_2": (
        "mnist",
        "cnn_2",
        (10.0, 1.0),
        {
            "geodp_0.1-8192": (GeoDP(0.1), 8192, "l2"),
            "geodp_0.5-8192": (GeoDP(0.5), 8192, "l2"),
        },
    ),
    "table_3": (
        "cifar10",
        "resnet_3",
        (0.1, 0.01),
        {
            "geodp_1-8192": (GeoDP(1.0), 8192, "l2"),
            "geodp_1-16384": (GeoDP(1.0), 16_384, "l2"),
        },
    ),
}
"""Data set, model, both values of σ, and the rows of only one table."""

NOISE_FREE = {"dp-16384": ROWS["dp-16384"]}


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns twenty epochs of each row."""
    return {
        f"{table}/sigma-{sigma:g}/{name}": ExperimentConfig(
            method=method,
            dataset=dataset,
            model=model,
            steps=20 * (60_000 if dataset == "mnist" else 50_000) // batch,
            batch_size=batch,
            microbatch_size=256,
            learning_rate=10.0,
            clip=clip,
            l2_clip_norm=0.1,
            epsilon=None,
            noise_multiplier=sigma,
            accountant="rdp" if sigma >= 1 else "pld",
        )
        for table, (dataset, model, sigmas, own) in TABLES.items()
        for sigma in (0.0, *sigmas)
        for name, (method, batch, clip) in ((ROWS | own) if sigma else NOISE_FREE).items()
    }
