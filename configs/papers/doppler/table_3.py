"""DOPPLER, Table 3: fine-tuning RoBERTa-base on GLUE. Names are TASK/eps-E/METHOD.

All weights are trained, from `--pretrained`, a copy of FacebookAI/roberta-base. The paper follows
the published script of Li et al. (2021): batches of 1000, 2000, 6000, 6000 and 3, 6, 18, 18 epochs
for SST-2, QNLI, QQP, MNLI, η = 5e-4 decaying linearly, C = 0.1, 256 tokens, no weight decay. That
script asks the masked language model to fill in a word; here a classification head is trained.
"""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, LPAdam, Method

TASKS = {"sst2": (67_349, 1), "qnli": (104_743, 2), "qqp": (363_846, 6), "mnli": (392_702, 6)}
"""Number of training examples, and the factor of batch size and epochs."""

METHODS: dict[str, tuple[Method, str]] = {
    "dp_adam": (DPSGD(), "adam"),
    "dp_adam_bc": (LPAdam("momentum", noise_corrected=True), "sgd"),
    "lp_dp_adam_bc": (LPAdam("doppler-first-order-1", noise_corrected=True), "sgd"),
}


def get_configs() -> dict[str, TrainConfig]:
    """δ = 1/N^1.1; the table's three rows."""
    return {
        f"{task}/eps-{epsilon:g}/{name}": TrainConfig(
            method=method,
            dataset=task,
            model="roberta_base",
            sequence_length=256,
            steps=3 * factor * size // (1000 * factor),
            batch_size=1000 * factor,
            microbatch_size=20,
            optimizer=optimizer,
            learning_rate=5e-4,
            schedule="linear",
            l2_clip_norm=0.1,
            epsilon=epsilon,
            delta=size**-1.1,
            eval_every=20,
        )
        for task, (size, factor) in TASKS.items()
        for epsilon in (3.0, 8.0)
        for name, (method, optimizer) in METHODS.items()
    }
