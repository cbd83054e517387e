"""DiSK, Figure 7: ResNet-50 on ImageNet, as De et al. (2022) train it, without and with DiSK.

The paper kept all options of De et al. on, and states none of their values. From the published
configuration: B = 16,384, 71,589 steps of SGD at η = 4, normalised clipping at C = 1, σ = 2.5, said
to be ε = 8 at δ = 8e-7; four copies of each image, moved by up to four pixels with mirrored edges
and flipped; the average of the parameters with decay 0.99999. Weights are standardised, and the
norm is the group normalisation that the DiSK paper names, where the configuration has a network
without any. κ and γ are not stated for this figure: here those of Table 2 for ImageNet. All
training images are used, where De et al. hold 10,000 out for validation.

`base_plain` and `disk_plain` are without copies and average, for a quarter of the operations; they
are not in the figure.
"""

import dataclasses

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, Augmented, AugmentedDisk, Disk

COPIES = {"multiplicity": 4, "shift": 4, "mirrored": True, "flip": True}
DISK = {"kappa": 0.7, "gamma": 0.5}


def get_configs() -> dict[str, TrainConfig]:
    """Without and with DiSK, with all options and plain."""
    plain = TrainConfig(
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
    whole = dataclasses.replace(plain, parameter_ema=0.99999)
    return {
        "base": dataclasses.replace(whole, method=Augmented(**COPIES)),
        "disk": dataclasses.replace(whole, method=AugmentedDisk(**COPIES, **DISK)),
        "base_plain": dataclasses.replace(plain, method=DPSGD()),
        "disk_plain": dataclasses.replace(plain, method=Disk(**DISK)),
    }
