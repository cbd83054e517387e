"""Configures DiSK, Tables 1 and 3: fine-tuning RoBERTa on GLUE.

Names are MODEL/TASK/eps-E/METHOD. `--pretrained` is a copy of FacebookAI/roberta-base or
roberta-large.

The paper takes η, B and the epochs from Bu et al. (2024), whose published script is that of Li et
al. (2021). For SST-2, QNLI, QQP and MNLI, the script has batches of 1000, 2000, 6000, 6000 and 3,
6, 18, 18 epochs. It has η = 5e-4 (5e-5 without privacy) and 256 tokens. Here a classification head
is trained. AdamW is Adam, because that script has no weight decay. The rate decays by cosine
without warm-up, as C.1 says; the script decays it linearly.

Noise is accounted by Rényi divergences (C.1). LoRA has rank 16 on the query and value projections.
Its scale is not stated; here it is 16. δ is that of Table 7, which equals 1/N^1.1 for SST-2 and
QQP, is slightly smaller for MNLI, and much smaller for QNLI.
"""

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Disk, Method, NonPrivate

TASKS = {
    "mnli": (392_702, 6, 6.3e-7),
    "qnli": (104_743, 2, 4.8e-7),
    "sst2": (67_349, 1, 4.9e-6),
    "qqp": (363_846, 6, 7.6e-7),
}
"""Number of training examples, the factor of batch size and epochs, and δ."""

KF = Disk(kappa=0.7, gamma=0.5)
METHODS: dict[str, tuple[Method, int | None]] = {
    "adamw": (NonPrivate(), None),
    "lora": (NonPrivate(), 16),
    "dp_adamw": (DPSGD(), None),
    "kf_dp_adamw": (KF, None),
    "dp_lora": (DPSGD(), 16),
    "kf_dp_lora": (KF, 16),
}
LARGE = ("adamw", "lora", "dp_lora", "kf_dp_lora")
"""Rows of Table 3 for RoBERTa-large."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns runs at ε = 1 and 6.7 with automatic clipping (C.2), and without ε."""
    rows = {}
    for model in ("roberta_base", "roberta_large"):
        for task, (size, factor, delta) in TASKS.items():
            for epsilon in (1.0, 6.7, None):
                for name, (method, rank) in METHODS.items():
                    if method.private == (epsilon is None):
                        continue
                    if model == "roberta_large" and name not in LARGE:
                        continue
                    label = "eps-inf" if epsilon is None else f"eps-{epsilon:g}"
                    rows[f"{model}/{task}/{label}/{name}"] = ExperimentConfig(
                        method=method,
                        dataset=task,
                        model=model,
                        sequence_length=256,
                        lora_rank=rank,
                        steps=3 * factor * size // (1000 * factor),
                        batch_size=1000 * factor,
                        microbatch_size=20,
                        optimizer="adam",
                        learning_rate=5e-4 if method.private else 5e-5,
                        schedule="cosine",
                        clip="auto_v",
                        epsilon=epsilon,
                        delta=delta,
                        accountant="rdp",
                        eval_every=20,
                    )
    return rows
