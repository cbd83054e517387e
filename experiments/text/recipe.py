"""The recipe `python -m experiments text`: MiniLM on AG News and SST-2 at several ε."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training.run import records
from experiments.models.transformer import Lora
from experiments.text.encoder import (
    Features,
    LastProjection,
    features,
    fetch_minilm,
    last_layer,
    load_encoder,
    public_directions,
    tokenize,
)
from experiments.text.texts import LENGTHS, Texts, read_texts
from experiments.text.training import (
    DELTA,
    Problem,
    Settings,
    Trained,
    accuracy,
    make_plan,
    noise_multipliers,
    start_head,
    train,
)

TITLES = {"agnews": "AG News", "sst2": "SST-2"}
RANK = 32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The tuned settings of a data set at one ε.

    Attributes:
        probe: Steps that train only the head.
        lora: Steps that then train head and LoRA.
        share: The ε of the head, as a share of the whole ε, if LoRA follows.
    """

    probe: Settings
    lora: Settings
    share: float = 0.5


ARMS = {"head": "head", "lora": "head, then LoRA with frozen A"}
"""The ways to train, and their names in the table."""


def recipe_of(name: str, owners: int, epsilon: float | None) -> Recipe:
    """Returns the settings of a data set, tuned on a held-out part of its training texts."""
    if epsilon is None:
        rate = {"agnews": 0.05, "sst2": 0.02}[name]
    else:
        rate = 0.2 if name == "agnews" and epsilon > 2 else 0.1
    small = epsilon is not None and epsilon < 2
    return Recipe(
        probe=Settings(100, owners // 4, rate, clip=0.3),
        lora=Settings(
            steps=40,
            batch=min(512, owners // 4),
            rate=0.005 if small else 0.02,
            clip=0.3,
            lora_rate=0.001 if small else 0.01,
            lora_clip=0.3,
        ),
        share=0.8 if small else 0.5,
    )


@dataclasses.dataclass(frozen=True)
class TextArguments:
    """Classifies texts with a private head on MiniLM, and with private LoRA below it.

    Attributes:
        data_dir: Folder with the labelled texts, agnews_*.tsv and SST-2_*.tsv, or the same with
            .xz.
        cache_dir: Folder for the weights, which the package index provides, and for features.
        data: Data sets.
        epsilons: Values of ε, at δ = 1e-5. Training without privacy is always included.
        seeds: Number of runs for each value.
        arms: Ways to train: "head", "lora".
        output: File that gets a line of JSON for each run. Runs that it holds are not repeated.
    """

    data_dir: Path
    cache_dir: Path = Path("runs/text")
    data: tuple[str, ...] = ("agnews", "sst2")
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    seeds: int = 5
    arms: tuple[str, ...] = ("head", "lora")
    output: Path = Path("runs/text/runs.jsonl")


def run(given: TextArguments) -> str:
    """Trains all runs, and returns guarantees and the table."""
    model = fetch_minilm(given.cache_dir)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in given.data:
        probe, lora = problems(model, read_texts(name, given.data_dir), name, given.cache_dir)
        rows = list(_runs(given, name, probe, lora))
        parts += [f"## {TITLES[name]}", _described(probe, rows), _table(given, rows)]
    return "\n\n".join(parts) + "\n"


def problems(model: Path, texts: Texts, name: str, cache_dir: Path) -> tuple[Problem, Problem]:
    """Returns the problems of a head, and of a head with LoRA below it."""
    length, trained = LENGTHS[name]
    train_features = _cached(model, texts.texts, (length, trained), cache_dir)
    test_features = _cached(model, texts.test_texts, (length, length), cache_dir)
    _, variables = load_encoder(model, Lora(1, 1.0, ("output",)), jax.random.key(0))
    layer = variables["frozen"][last_layer(variables)]

    def columns(found: Features, labels: np.ndarray, lora: bool) -> dict[str, np.ndarray]:
        if not lora:
            return {"inputs": found.pooled, "labels": labels}
        parts = {"inputs": found.inputs, "sums": found.sums, "used": found.used}
        return {**parts, "labels": labels}

    both = [
        Problem(
            columns(train_features, texts.labels, lora),
            texts.owners,
            columns(test_features, texts.test_labels, lora),
            texts.classes,
        )
        for lora in (False, True)
    ]
    width = train_features.pooled.shape[1]
    encoder = LastProjection(RANK, frozen_a=True, width=width)
    frozen = {"output_norm": layer["output_norm"]}
    return both[0], dataclasses.replace(both[1], encoder=encoder, frozen=frozen)


def train_both(
    probe: Problem, lora: Problem, recipe: Recipe, epsilon: float | None, *, seed: int
) -> Trained:
    """Trains the head, then head and LoRA, with one guarantee for both."""
    plan = None
    if epsilon is not None:
        parts = (recipe.probe, recipe.share * epsilon), (recipe.lora, epsilon)
        noise = noise_multipliers(len(np.unique(probe.owners)), parts)
        plan = make_plan(probe, recipe.probe, noise[0], seed=2 * seed)
    first = train(probe, recipe.probe, _start(probe), seed=2 * seed, plan=plan)
    if epsilon is not None:
        also = [first.guarantee]
        plan = make_plan(lora, recipe.lora, noise[1], seed=2 * seed + 1, also=also)
    assert lora.encoder is not None
    b = jnp.zeros((lora.encoder.rank, lora.encoder.width))
    begun = {"head": first.params["head"], "lora": {"lora_b": b}}
    return train(lora, recipe.lora, begun, seed=2 * seed + 1, plan=plan)


def train_head(probe: Problem, recipe: Recipe, epsilon: float | None, *, seed: int) -> Trained:
    """Trains only the head; without privacy if `epsilon` is None."""
    plan = None
    if epsilon is not None:
        (noise,) = noise_multipliers(len(np.unique(probe.owners)), ((recipe.probe, epsilon),))
        plan = make_plan(probe, recipe.probe, noise, seed=2 * seed)
    return train(probe, recipe.probe, _start(probe), seed=2 * seed, plan=plan)


def _start(probe: Problem) -> dict[str, Any]:
    return {"head": start_head(probe.train["inputs"].shape[1], probe.classes)}


def _runs(
    given: TextArguments, name: str, probe: Problem, lora: Problem
) -> Iterator[dict[str, Any]]:
    """Yields the record of each run, from the file of records or by training."""
    known, owners = {}, len(np.unique(probe.owners))
    if given.output.is_file():
        lines = given.output.read_text(encoding="utf-8").splitlines()
        known = {_key(record): record for record in map(json.loads, lines)}
    for seed, epsilon, arm in itertools.product(
        range(given.seeds), (*given.epsilons, None), given.arms
    ):
        recipe = recipe_of(name, owners, epsilon)
        record = {"data": name, "arm": arm, "epsilon": epsilon, "seed": seed}
        if (found := known.get(_key(record))) is None:
            begun = time.monotonic()
            if arm == "head":
                trained, problem = train_head(probe, recipe, epsilon, seed=seed), probe
            else:
                trained = train_both(probe, lora, recipe, epsilon, seed=seed)
                problem = lora
            spent = None if trained.guarantee is None else trained.guarantee.epsilon(DELTA)
            found = {
                **record,
                "accuracy": accuracy(problem, trained.params),
                "averaged": accuracy(problem, trained.average),
                "spent": spent,
                "seconds": round(time.monotonic() - begun, 1),
            }
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            if trained.guarantee is not None and seed == 0:
                print(f"{TITLES[name]}, {ARMS[arm]}:\n{trained.guarantee}\n", flush=True)
        yield found


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[field] for field in ("data", "arm", "epsilon", "seed"))


def _table(given: TextArguments, rows: list[dict[str, Any]]) -> str:
    """Returns a table of mean accuracies, in percent, ± their standard deviation."""
    columns = (*given.epsilons, None)
    header = ("", *(f"ε = {epsilon:g}" for epsilon in given.epsilons), "not private")
    body = []
    for arm, value in itertools.product(given.arms, ("accuracy", "averaged")):
        cells = []
        for epsilon in columns:
            found = [r[value] for r in rows if (r["arm"], r["epsilon"]) == (arm, epsilon)]
            spread = f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else ""
            cells.append(f"{np.mean(found):.1f}{spread}")
        title = ARMS[arm] + (", average of the last half" if value == "averaged" else "")
        body.append((title, *cells))
    return records.markdown_table(header, body)


def _described(probe: Problem, rows: list[dict[str, Any]]) -> str:
    owners, texts = len(np.unique(probe.owners)), len(probe.owners)
    runs = max((row["seed"] for row in rows), default=0) + 1
    return (
        f"{texts:,} texts of {owners:,} owners, {len(probe.test['labels']):,} test texts, "
        f"δ = 1e-5, {runs} seeds. Test accuracy in percent, mean ± standard deviation."
    )


def _cached(model: Path, texts: Any, lengths: tuple[int, int], folder: Path) -> Features:
    """Returns features of texts, kept in `folder`, of the first `lengths[1]` tokens."""
    parts = (*map(str, lengths), str(RANK), *texts)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    path = folder / f"features-{digest[:16]}.npz"
    if path.is_file():
        with np.load(path) as stored:
            return Features(**stored)
    encoder, variables = load_encoder(model, Lora(1, 1.0, ("output",)), jax.random.key(0))
    a = public_directions(variables, RANK)
    found = features(encoder, variables, tokenize(model, texts, lengths[0]), a, lengths[1])
    np.savez(path, **found._asdict())
    return found
