"""Lists the papers' configured runs, and counts the gradients of a run."""

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp

import dpoptax
from dpoptax.training.run import records
from experiments.config import ExperimentConfig

CLAIMS = {
    "disk/figure_1": "DiSK above its base at every ε; ε = 8: CIFAR-10 63 to 75 %, CIFAR-100 21 to "
    "42 % (introduction); CIFAR-100, ε = 0.5 to 8: 14.7 to 42.0 % (Table 6; section 5.2 has 41.8)",
    "disk/figure_2_4": "DiSK converges faster and ends higher than its base on every task; "
    "ImageNet 36.89 % with ViT-small (section 5.2), which Table 6 has of ResNet-50",
    "disk/figure_5": "DiSK above DPAdam, loses less at small ε; ε = 0.5 to 8: 83.49 to 88.49 %; "
    "85 to 89 % in the introduction",
    "disk/figure_6": "DiSK above DOPPLER and DP-FTRL at every ε",
    "disk/figure_7": "test accuracy 33.56 %, with DiSK 36.89 % (section 5.2 has the latter of "
    "ViT-small); validation 36.35 % and 40 %",
    "disk/figure_8": "there is a best pair of κ and γ for each ε",
    "disk/table_1_3": "DiSK above DP everywhere, at ε = 1 by at least 3.8 points (section 5.2; its "
    "Table 1 has 0.1 to 2.7); LoRA, base, ε = 1: MNLI 84.7, 81.1 % without DiSK",
    "disk/table_4_5": "DiSK above DP in every score; E2E, ε = 3: BLEU 68.35, 61.52 % without DiSK",
    "doppler/figure_2": "noise fills all frequencies; filtered gradients lie in the low ones",
    "doppler/figure_3_7": "LP-DPSGD above DPSGD on MNIST, CIFAR-10, CIFAR-100, for every model",
    "doppler/figure_4": "every optimizer is better with the filter, at every ε",
    "doppler/figure_8_9": "the second-order filter is slow; automatic above vanilla clipping, "
    "flat above each layer's own",
    "doppler/figure_10_11": "0.001 is the best rate; a schedule slows the beginning and helps when "
    "epochs are many",
    "doppler/figure_12": "less than 1 point better with the filter at small ε, less still at large",
    "doppler/table_3": "slightly above DPAdamBC, not significantly above DPAdam; ε = 3: MNLI "
    "83.55, 82.39 % without the filter",
    "pmlf/figure_1": "LP-DPSGD below DPSGD at ε = 8, InnerOuter below it at ε = 1",
    "pmlf/figure_2": "DP-PMLF above all: CNN about 47 %, 9 points more than the next; ResNet-18 "
    "nearly 50 %, 1 to 2 more; ViT about 31 %, the next 23 %",
    "pmlf/figure_3_5": "both parts help, but on CIFAR-10 the filter costs up to 0.7 points above "
    "ε = 6; ResNet-18, 100 epochs: MNIST 91, Fashion-MNIST 82.35 (as InnerOuter), CIFAR-100 11 %",
    "pmlf/figure_6_7": "on MNIST β changes accuracy by less than 0.3 points; k = 2 is best there, "
    "k = 4 on CIFAR-10",
    "pmlf/table_1_3": "DP-PMLF above DP-SGD and LP-DPSGD; InnerOuter at times slightly above it, "
    "and with ViT on CIFAR far below DP-SGD (CIFAR-10, ε = 1: 11.55 against 35.74 %); MNIST, CNN, "
    "ε = 1: 92 %, DP-SGD 3 points less",
    "pmlf/table_2": "DP-PMLF above all baselines but for SST-2 at ε = 8; MNLI, ε = 1: 56.81, next "
    "52.75 %",
    "pmlf/table_4": "the filter matters: at ε = 2 MNIST 90.6 to 92.4 %, CIFAR-10 57.7 to 60.5 %",
    "geodp/figure_5": "GeoDP's loss is below DP's, but not at σ = 10 with β = 1, and nearly that "
    "without noise at B = 4096 or σ = 0.01; DP's hardly depends on B and σ",
    "geodp/tables_2_3": "GeoDP above DP but for large β; MNIST, σ = 1: 98.0 against 95.5 %, "
    "99.11 % without noise; CIFAR-10, σ = 0.01: 67.35 against 63.84 %, 67.43 % without noise",
}
"""The papers' claims about the runs of a config file, by file name."""

REPETITIONS = {"pmlf": 5, "geodp": 100, "doppler": 1}
"""Number of repetitions in the papers, by folder. The sources are the hyper-parameters of DP-PMLF,
section VI-A of GeoDP and the checklist of DOPPLER. DiSK does not state it."""


def points(config: ExperimentConfig) -> int:
    """Returns the number of gradients per example and step, counting copies."""
    params = {"w": jnp.zeros(2)}
    method = config.method.filter(1.0)
    found = dpoptax.gradient_points(method.init(params), params)
    copies: int = getattr(config.method, "multiplicity", 1)
    return (len(found.points) + (found.tangent is not None)) * copies


def claims_table(counts: Mapping[Path, int]) -> str:
    """Returns a Markdown table with a row per config file, for its number of runs."""
    rows = []
    for file, count in counts.items():
        name = f"{file.parent.name}/{file.stem}"
        repetitions = str(REPETITIONS.get(file.parent.name, ""))
        rows.append((f"`configs/papers/{name}.py`", CLAIMS.get(name, ""), str(count), repetitions))
    header = ("config", "the paper's claim", "runs", "repetitions in the paper")
    return records.markdown_table(header, rows)
