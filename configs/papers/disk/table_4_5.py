"""Configures DiSK, Tables 4 (E2E) and 5 (DART): fine-tuning GPT-2.

Names are DATASET/eps-E/METHOD. All weights are trained from `--pretrained`, a copy of
openai-community/gpt2.

The paper takes η, B and the epochs from the published script of Li et al. (2021): batches of 1024;
for E2E 10 epochs at η = 2e-3 with 100 tokens; for DART 15 epochs at 5e-4 with 120 tokens. AdamW is
Adam, because that script has no weight decay. The rate decays by cosine without warm-up, as C.1
says; the script keeps it constant. Noise is accounted by Rényi divergences (C.1). δ is that of
Table 7, which is half of 1/N, and not 1/N^1.1 as the text says. For DART, N counts the 82,191
examples of all splits.

The trainer reports the perplexity of the references. For BLEU and ROUGE-L, `python -m experiments
generate` of commit c6d0562f generates texts by beam search. One of the five values of "Val. Perp."
in Table 5, the non-private one, is 0.921. A perplexity cannot be below 1, but a cross-entropy in
nats can.
"""

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Disk, NonPrivate

TASKS = {"e2e": (42_061, 10, 2e-3, 100, 1.2e-5), "dart": (62_659, 15, 5e-4, 120, 6.1e-6)}
"""Number of training examples, epochs, η, tokens, and δ."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns C = 1, κ = 0.7, γ = 0.5 for ε = 3 and 8 and non-private runs."""
    methods = {"dp_adamw": DPSGD(), "kf_dp_adamw": Disk(kappa=0.7, gamma=0.5)}
    return {
        f"{task}/{label}/{name}": ExperimentConfig(
            method=method,
            dataset=task,
            model="gpt2",
            sequence_length=length,
            steps=epochs * size // 1024,
            batch_size=1024,
            microbatch_size=16,
            optimizer="adam",
            learning_rate=rate if method.private else rate / 10,
            schedule="cosine",
            clip="auto_v",
            epsilon=epsilon,
            delta=delta,
            accountant="rdp",
            eval_every=50,
        )
        for task, (size, epochs, rate, length, delta) in TASKS.items()
        for epsilon, label in ((3.0, "eps-3"), (8.0, "eps-8"), (None, "eps-inf"))
        for name, method in ({"adamw": NonPrivate()} if epsilon is None else methods).items()
    }
