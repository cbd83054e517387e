"""GeoDP, Figure 5 (MNIST, logistic regression) and Tables II (MNIST, CNN) and III (CIFAR-10).

Names are TABLE/sigma-S/METHOD-BATCH. The paper states σ and no ε. For DP the trainer reports the ε
that σ implies, at δ = 1e-5; for GeoDP none, because none is proven. At σ = 0.1 and 0.01 that ε is
1,300 to 180,000, no protection, and only "pld" states it. C = 0.1 (section VI); learning rates are
not stated. The rows with importance sampling (IS) and selective updates (SUR) are not here: they
are other samplers.
"""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, GeoDP

PANELS = {
    "figure_5": ("mnist", "linear", (1.0, 0.1, 0.01), (2048, 4096), (0.5, 1.0)),
    "table_2": ("mnist", "cnn_2", (10.0, 1.0), (8192, 16_384), (0.1, 0.5)),
    "table_3": ("cifar10", "resnet_3", (0.1, 0.01), (8192, 16_384), (0.1, 1.0)),
}
CLIPS = {"": "l2", "_auto_s": "auto_s", "_psac": "psac"}


def get_configs() -> dict[str, TrainConfig]:
    """Twenty epochs, and 350 steps of the logistic regression."""
    rows = {}
    for panel, (dataset, model, sigmas, batches, betas) in PANELS.items():
        size = 60_000 if dataset == "mnist" else 50_000
        for sigma in sigmas:
            methods = {f"geodp_{beta:g}": GeoDP(beta) for beta in betas} | {"dp": DPSGD()}
            for batch in batches:
                for name, method in methods.items():
                    for suffix, clip in CLIPS.items():
                        rows[f"{panel}/sigma-{sigma:g}/{name}{suffix}-{batch}"] = TrainConfig(
                            method=method,
                            dataset=dataset,
                            model=model,
                            steps=350 if panel == "figure_5" else 20 * size // batch,
                            batch_size=batch,
                            microbatch_size=256,
                            learning_rate=10.0,
                            clip=clip,
                            l2_clip_norm=0.1,
                            epsilon=None,
                            noise_multiplier=sigma,
                            accountant="rdp" if sigma >= 1 else "pld",
                        )
    return rows
