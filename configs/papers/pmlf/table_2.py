"""Configures DP-PMLF, Table 2: fine-tuning RoBERTa-base on GLUE.

Names are TASK/eps-E/METHOD. All weights are trained from `--pretrained`, a copy of
FacebookAI/roberta-base. C = 1, η = 0.5, B = 1000, δ = 1/N, 20 epochs (appendix). Not stated, and
assumed: the filter, here that of gray images; InnerOuter's momenta, 0.1 over two iterates and 0.9;
a length of 128 tokens.
"""

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, PMLF, Doppler, InnerOuter

SIZES = {"mnli": 392_702, "qnli": 104_743, "qqp": 363_846, "sst2": 67_349}
METHODS = {
    "dp_sgd": DPSGD(),
    "lp_dp_sgd": Doppler(preset="pmlf-mnist"),
    "inner_outer": InnerOuter(),
    "pmlf": PMLF(length=2, beta=0.1, preset="pmlf-mnist"),
}


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns β = 0.1 and k = 2 for four tasks, two ε and four methods."""
    return {
        f"{task}/eps-{epsilon:g}/{name}": ExperimentConfig(
            method=method,
            dataset=task,
            model="roberta_base",
            steps=20 * size // 1000,
            batch_size=1000,
            microbatch_size=20,
            learning_rate=0.5,
            l2_clip_norm=1.0,
            epsilon=epsilon,
            delta=1 / size,
            eval_every=100,
        )
        for task, size in SIZES.items()
        for epsilon in (1.0, 8.0)
        for name, method in METHODS.items()
    }
