"""Measures splits of a compute budget into batch size and steps, at equal ε."""

import optax

import dpoptax
from dpoptax import accounting
from dpoptax.training.bars import Bar
from dpoptax.training.run.files import markdown_table
from experiments.digits.arms import Arm, measure, split_digits

EPOCHS, EPSILON, DELTA = 40, 3.0, 1e-5


def batches_page(*, trials: int = 16, seeds: int = 10, epochs: int = EPOCHS) -> str:
    """Trains each option of `suggest_plan` and returns a table in Markdown."""
    split = split_digits()
    size = len(split.private[1])
    suggestion = accounting.suggest_plan(
        dataset_size=size,
        epsilon=EPSILON,
        delta=DELTA,
        examples=epochs * size,
        min_steps=25,
        accountant="rdp",
    )
    rows = []
    for option in Bar(suggestion.options, "batches", unit="batch size"):
        plan = dpoptax.PrivacyPlan(
            dataset_size=size,
            batch_size=option.batch_size,
            steps=option.steps,
            noise_multiplier=option.noise_multiplier,
            delta=DELTA,
            accountant="rdp",
        )
        arm = Arm({"rate": (0.03, 10.0)}, plan, lambda settings: optax.sgd(settings["rate"]))
        result = measure(arm, split, trials=trials, seeds=seeds)
        rows.append(
            (
                f"{option.batch_size:,}",
                f"{option.steps:,}",
                f"{option.noise_multiplier:.2f}",
                f"{option.noise_batch_ratio:.3g}",
                f"{100 * option.excess:.1f} %",
                f"{result.settings['rate']:.2g}",
                str(result),
            )
        )
    heads = ("B", "T", "σ", "σ/B", "excess", "learning rate", "test accuracy")
    return (
        "# Batch size and steps at equal compute, on digits\n\n"
        f"A network with 64 hidden units and {size:,} private examples, for {epochs} epochs at "
        f"ε = {EPSILON:g}, δ = {DELTA:g}, by DP-SGD with C = 1. Each batch size has {trials} "
        f"learning rates, chosen by validation accuracy. Accuracies are means and standard "
        f"deviations over {seeds} other seeds.\n\n"
        + markdown_table(heads, rows)
        + f"\n\n`suggest_plan` chooses B = {suggestion.chosen.batch_size:,}.\n"
    )
