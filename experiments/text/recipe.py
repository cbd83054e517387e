"""The recipe `python -m experiments text`: MiniLM on AG News and SST-2 at several ε."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from dpoptax.training.run import files
from experiments.models.language import BertEncoder
from experiments.models.transformer import Lora
from experiments.run_once import record_once
from experiments.spreads import mean_and_deviation, mean_and_interval, paired_difference
from experiments.text.arms import ARMS, Problems, train_arm
from experiments.text.encoder import (
    Features,
    Variables,
    features,
    fetch_minilm,
    last_layer,
    load_encoder,
    public_directions,
    tokenize,
)
from experiments.text.texts import LENGTHS, Texts, read_texts
from experiments.text.training import Problem
from experiments.text.trials import best, tune
from experiments.transfer.training import DELTA

TITLES = {"agnews": "AG News", "sst2": "SST-2"}
DIRECTIONS = 128  # of the last projection's inputs


@dataclasses.dataclass(frozen=True)
class TextArguments:
    """The flags of the recipe on texts.

    Attributes:
        data_dir: Folder with the labelled texts, agnews_*.tsv and SST-2_*.tsv, or the same with
            .xz.
        cache_dir: Folder for the weights, which the package index provides, and for features.
        data: Data sets.
        epsilons: Values of ε, at δ = 1e-5. Training without privacy is always included.
        seeds: Number of runs for each value.
        arms: Ways to train: "head", "lora" (frozen A) or "lora-trained-a".
        shares: Shares of the training owners, 1 for all.
        tune: Whether to try settings on held-out training owners, instead of training with the
            best ones.
        trials: File with a line of JSON for each trial of `tune`. Trials that it holds are not
            repeated.
        output: File that gets a line of JSON for each run. Runs that it holds are not repeated.
    """

    data_dir: Path
    cache_dir: Path = Path("runs/text")
    data: tuple[str, ...] = ("agnews", "sst2")
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    seeds: int = 5
    arms: tuple[str, ...] = ("head", "lora")
    shares: tuple[float, ...] = (1.0,)
    tune: bool = False
    trials: Path = Path("experiments/results/text-trials.jsonl")
    output: Path = Path("runs/text/runs.jsonl")


def run(given: Annotated[TextArguments, tyro.conf.arg(name="")]) -> str:
    """Classifies texts with a private head on MiniLM, and with private LoRA below it."""
    texts = {name: read_texts(name, given.data_dir) for name in given.data}
    model, parts = fetch_minilm(given.cache_dir), []
    for name in given.data:
        whole = problems(model, texts[name], name, given.cache_dir)
        parts.append(f"## {TITLES[name]}")
        if given.tune:
            epsilons = (*given.epsilons, None)
            tuned = tune(whole, name, given.arms, epsilons, seeds=given.seeds, path=given.trials)
            parts.append(tuned)
            continue
        for share in given.shares:
            some = whole.subset(share)
            rows = list(_runs(given, name, share, some))
            parts += [_described(some.head, rows), _table(given, rows), _differences(given, rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def problems(model: Path, texts: Texts, name: str, cache_dir: Path) -> Problems:
    """Returns the problems of a head, and of a head with LoRA below it."""
    length, trained = LENGTHS[name]
    train_features = cached_features(model, texts.texts, (length, trained), cache_dir)
    test_features = cached_features(model, texts.test_texts, (length, length), cache_dir)
    _, variables = _encoder(model)
    frozen = {"output_norm": variables["frozen"][last_layer(variables)]["output_norm"]}

    def columns(found: Features, labels: np.ndarray, lora: bool) -> dict[str, np.ndarray]:
        if not lora:
            return {"inputs": found.pooled, "labels": labels}
        parts = {"inputs": found.inputs, "sums": found.sums, "used": found.used}
        return {**parts, "labels": labels}

    both = (
        Problem(
            columns(train_features, texts.labels, lora),
            texts.owners,
            columns(test_features, texts.test_labels, lora),
            texts.classes,
            frozen=frozen if lora else None,
        )
        for lora in (False, True)
    )
    return Problems(*both)


def _runs(
    given: TextArguments, name: str, share: float, problems: Problems
) -> Iterator[dict[str, Any]]:
    """Yields the record of each run, from the file of records or by training."""
    for seed, epsilon, arm in itertools.product(
        range(given.seeds), (*given.epsilons, None), given.arms
    ):
        fields = {"data": name, "share": share, "arm": arm, "epsilon": epsilon, "seed": seed}
        run = functools.partial(_run, given.trials, problems, name, arm, epsilon, seed)
        yield record_once(given.output, fields, run)


def _run(
    trials: Path, problems: Problems, data: str, arm: str, epsilon: float | None, seed: int
) -> dict[str, Any]:
    chosen = {name: best(trials, data, name, epsilon) for name in {"head", arm}}
    problem, trained = train_arm(problems, arm, chosen, epsilon, seed=seed)
    if trained.guarantee is not None and seed == 0:
        print(f"{TITLES[data]}, {ARMS[arm].title}:\n{trained.guarantee}\n", flush=True)
    spent = None if trained.guarantee is None else trained.guarantee.epsilon(DELTA)
    return {"accuracy": problem.accuracy(trained.params), "spent": spent}


def _table(given: TextArguments, rows: list[dict[str, Any]]) -> str:
    """Returns a table of mean accuracies, in percent, ± their standard deviation."""
    body = []
    for arm in given.arms:
        cells = [mean_and_deviation(x.values(), 1) for x in _by_epsilon(given, rows, arm)]
        body.append((ARMS[arm].title, *cells))
    return files.markdown_table(_header(given), body)


def _differences(given: TextArguments, rows: list[dict[str, Any]]) -> str:
    """Returns a table of differences paired by seed, with 95 % intervals."""
    body = []
    for arm in given.arms:
        if arm == "head" or "head" not in given.arms or given.seeds < 2:
            continue
        pairs = zip(*(_by_epsilon(given, rows, name) for name in (arm, "head")), strict=True)
        cells = [mean_and_interval(*paired_difference(*pair)) for pair in pairs]
        body.append((f"{ARMS[arm].title}, minus {ARMS['head'].title}", *cells))
    return files.markdown_table(_header(given), body) if body else ""


def _by_epsilon(
    given: TextArguments, rows: list[dict[str, Any]], arm: str
) -> list[dict[int, float]]:
    """Returns the accuracies of each seed, for each ε."""
    return [
        {r["seed"]: r["accuracy"] for r in rows if (r["arm"], r["epsilon"]) == (arm, epsilon)}
        for epsilon in (*given.epsilons, None)
    ]


def _header(given: TextArguments) -> tuple[str, ...]:
    return ("", *(f"ε = {epsilon:g}" for epsilon in given.epsilons), "not private")


def _described(probe: Problem, rows: list[dict[str, Any]]) -> str:
    owners, texts = len(np.unique(probe.owners)), len(probe.owners)
    runs = max((row["seed"] for row in rows), default=0) + 1
    return (
        f"{texts:,} texts of {owners:,} owners, {len(probe.test['labels']):,} test texts, "
        f"δ = 1e-5, {runs} seeds. Test accuracy in percent, mean ± standard deviation. "
        "Differences are paired by seed, ± half of their 95 % intervals."
    )


def cached_features(
    model: Path, texts: Sequence[str], lengths: tuple[int, int], folder: Path
) -> Features:
    """Returns features of texts, kept in `folder`, of the first `lengths[1]` tokens."""
    parts = (*map(str, lengths), str(DIRECTIONS), *texts)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    path = folder / f"features-{digest[:16]}.npz"
    if path.is_file():
        with np.load(path) as stored:
            return Features(**stored)
    encoder, variables = _encoder(model)
    tokens, a = tokenize(model, texts, lengths[0]), public_directions(variables, DIRECTIONS)
    found = features(encoder, variables, tokens, a, lengths[1])
    np.savez(path, **found._asdict())
    return found


def _encoder(model: Path) -> tuple[BertEncoder, Variables]:
    return load_encoder(model, Lora(1, 1.0, ("output",)), jax.random.key(0))
