"""DiSK, Figure 7: ResNet-50 on ImageNet, as De et al. (2022) train it, without and with DiSK.

From the published configuration of De et al.: B = 16,384, 71,589 steps of SGD at η = 4, normalised
clipping at C = 1, σ = 2.5, said to be ε = 8 at δ = 8e-7. Their augmentation multiplicity of 4 and
averaged parameters are not in these rows, and the network here has group normalisation.
"""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, Disk


def get_configs() -> dict[str, TrainConfig]:
    """κ = 0.7, γ = 0.5."""
    return {
        name: TrainConfig(
            method=method,
            dataset="imagenet",
            model="resnet_50",
            steps=71_589,
            batch_size=16_384,
            microbatch_size=32,
            learning_rate=4.0,
            clip="normalized",
            l2_clip_norm=1.0,
            epsilon=8.0,
            delta=8e-7,
            noise_multiplier=2.5,
            eval_every=1000,
            checkpoint_every=1000,
        )
        for name, method in (("base", DPSGD()), ("disk", Disk(kappa=0.7, gamma=0.5)))
    }
