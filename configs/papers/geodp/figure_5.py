"""GeoDP, Figure 5: training loss of logistic regression on MNIST over 350 iterations.

Names are PANEL/sigma-S/METHOD-BATCH; sigma-0 is the noise-free curve, here clipped gradients of the
panel's largest batch without noise. C = 0.1 and the panels' σ, β and B are those of section VI-A
and of the captions; the batch of panel (b)'s curves is one, 2,048, and β differs. The text of panel
(c) speaks of one curve of DP where σ has two values: here are both. All results are means of 100
repetitions, here one a seed (`--seed 0` to `--seed 99`).

Not stated and assumed: the learning rate, 10. The captions' d = 785 is the size of a logistic
regression with one output, but not which two classes it tells apart; here are all ten, 7,850
parameters, so that GeoDP's noise on the angles, which grows with √(d + 2), is larger than there.

The figure plots training losses, and so they are recorded. No ε covers them.

ε: for DP the trainer reports the one that σ implies at δ = 1e-5, over all iterations; for GeoDP
none, because none is proven. The paper has ε = 484.5, 153.2, 48.5, 15.3, 4.9, 1.5 at δ = 1e-5 for σ
= 1e-4, 1e-3, …, 10 (section VI-B): that is √(2 ln(1.25/δ))/√σ, one release of a Gaussian mechanism
whose variance, and not its standard deviation, is σ, although section IV makes σ the standard
deviation, as it is here. At σ = 0.1 and 0.01 the ε of all iterations protects nothing, and only
"pld" states it.
"""

from dpoptax.training.methods import DPSGD, GeoDP
from experiments.config import ExperimentConfig

PANELS = {
    "a": ((0.0, 4096, ()), (1.0, 4096, (1.0,)), (1.0, 2048, (1.0,))),
    "b": ((0.0, 2048, ()), (10.0, 2048, (1.0, 0.5))),
    "c": ((0.0, 256, ()), (0.1, 256, (1.0,)), (0.01, 256, (1.0,))),
}
"""Each panel's σ, batch and β; at each of them a curve of DP too."""


def get_configs() -> dict[str, ExperimentConfig]:
    """350 steps of each curve."""
    return {
        f"{panel}/sigma-{sigma:g}/{name}-{batch}": ExperimentConfig(
            method=method,
            dataset="mnist",
            model="linear",
            steps=350,
            batch_size=batch,
            microbatch_size=256,
            learning_rate=10.0,
            l2_clip_norm=0.1,
            epsilon=None,
            noise_multiplier=sigma,
            accountant="rdp" if sigma >= 1 else "pld",
            record_training_metrics=True,
        )
        for panel, curves in PANELS.items()
        for sigma, batch, betas in curves
        for name, method in {
            "dp": DPSGD(),
            **{f"geodp_{beta:g}": GeoDP(beta) for beta in betas},
        }.items()
    }
