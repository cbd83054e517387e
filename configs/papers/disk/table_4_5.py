"""DiSK, Tables 4 (E2E) and 5 (DART): fine-tuning GPT-2. Names are DATASET/eps-E/METHOD.

All weights are trained, from `--pretrained`, a copy of openai-community/gpt2. The paper takes η, B
and the epochs from the published script of Li et al. (2021): batches of 1024; 10 epochs at η = 2e-3
with 100 tokens for E2E, 15 at 5e-4 with 120 for DART. AdamW is Adam, for that script has no weight
decay; the rate decays by cosine without warm-up as C.1 says, where the script keeps it. Noise is
accounted by Rényi divergences (C.1). δ is that of Table 7: half of 1/N, and for DART of the 82,191
examples of all its splits, not 1/N^1.1 as the text says.

The trainer reports the perplexity of the references. `python -m experiments generate FILE:NAME
--workdir DIR` reports BLEU and ROUGE-L of a finished run. Of the five "Val. Perp." of Table 5 one,
without privacy, is below 1 (0.921), which no perplexity is; the cross-entropy in nats can be. BLEU
and ROUGE-L are of texts by beam search as in that script: 5 beams, length penalty 1, at most 100
tokens; but line breaks are not forbidden. They are of the development sets, by sacrebleu and
rouge-score: BLEU is counted as the E2E challenge's tool does, ROUGE-L is not (see
`experiments.generation.generation.scores`). METEOR, NIST and CIDEr need that tool; generated.jsonl
has the texts.
"""

from dpoptax.training.methods import DPSGD, Disk, NonPrivate
from experiments.config import ExperimentConfig

TASKS = {"e2e": (42_061, 10, 2e-3, 100, 1.2e-5), "dart": (62_659, 15, 5e-4, 120, 6.1e-6)}
"""Number of training examples, epochs, η, tokens, δ."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Automatic clipping at C = 1, κ = 0.7, γ = 0.5; ε of 3 and 8, and without privacy none."""
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
