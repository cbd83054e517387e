"""The recipe `python -m experiments public-texts`: private texts label public ones."""

import functools
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression

from dpoptax.accounting import Guarantee, calibrate
from dpoptax.columns import release_counts
from dpoptax.training.run import files
from experiments.run_once import record_once
from experiments.spreads import mean_and_deviation
from experiments.text.arms import Problems, train_arm
from experiments.text.encoder import fetch_minilm
from experiments.text.recipe import cached_features, problems
from experiments.text.texts import LENGTHS, TOPICS, read_news, read_texts
from experiments.text.trials import best
from experiments.transfer.training import DELTA, Params, classify

NAME = "agnews"
ARMS = {
    "names": "names of the topics, no private text",
    "votes": "public texts, labelled by votes",
    "labels": "public texts, labelled by the private head",
    "head": "private head",
    "own": "public texts with their own labels",
}
"""Ways to a classifier, from the floor to the ceiling."""


class Parts(NamedTuple):
    """Features and labels of the texts of one seed.

    Attributes:
        private: The problems of the private texts.
        public: Public texts, whose labels only the arm "own" uses.
        public_labels: Their labels.
        test: Other public texts.
        test_labels: Their labels.
        names: Features of the names of the topics.
    """

    private: Problems
    public: np.ndarray
    public_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    names: np.ndarray

    @property
    def classes(self) -> int:
        """The number of topics."""
        return len(self.names)


def run(
    *,
    data_dir: Path,
    texts: Path | None = None,
    cache_dir: Path = Path("runs/text"),
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0),
    seeds: int = 5,
    groups: int = 128,
    trials: Path = Path("experiments/results/text-trials.jsonl"),
    output: Path = Path("runs/text/public-texts.jsonl"),
) -> str:
    """Labels public texts with private ones, and classifies texts by them.

    Args:
        data_dir: Folder with the labelled texts of AG News.
        texts: File with public texts and their topics, as `sampled-texts` writes it. By default,
            public texts are half of the published test texts.
        cache_dir: Folder for the weights, which the package index provides, and for features.
        epsilons: Values of ε, at δ = 1e-5.
        seeds: Number of runs for each value.
        groups: Number of groups of public texts that private texts vote for.
        trials: File with the tuned settings of the private head.
        output: File that gets a line of JSON for each run. Runs that it holds are not repeated.
    """
    news, model = read_texts(NAME, data_dir), fetch_minilm(cache_dir)
    whole = problems(model, news, NAME, cache_dir)

    def embed(texts: Sequence[str]) -> np.ndarray:
        return cached_features(model, texts, (LENGTHS[NAME][0],) * 2, cache_dir).pooled

    names, given, recorded = embed(TOPICS), dict[str, Any](), dict[str, Any]()
    if texts is not None:
        sampled, topics = read_news(texts)
        given = {"public": embed(sampled), "public_labels": topics}
        recorded = {"texts": sha256(texts.read_bytes()).hexdigest()[:16]}
    rows = []
    for seed in range(seeds):
        parts = _split(whole, names, seed)._replace(**given)
        for arm in ARMS:
            for epsilon in epsilons if arm in ("votes", "labels", "head") else (None,):
                fields = {"arm": arm, "epsilon": epsilon, "seed": seed, "groups": groups}
                fields |= recorded
                job = functools.partial(_run, parts, arm, epsilon, seed, groups, trials)
                rows.append(record_once(output, fields, job))
    return _table(rows, epsilons, parts, seeds)


def _split(whole: Problems, names: np.ndarray, seed: int) -> Parts:
    """Returns the published training texts as private, and halves of the others."""
    features, labels = whole.head.test["inputs"], whole.head.test["labels"]
    order = np.random.default_rng(seed).permutation(len(labels))
    first, second = np.array_split(order, 2)
    parts = features[first], labels[first], features[second], labels[second]
    return Parts(whole, *parts, names)


def _run(
    parts: Parts, arm: str, epsilon: float | None, seed: int, groups: int, trials: Path
) -> dict[str, Any]:
    """Returns the accuracy on the test texts, and that of the labels, in percent."""
    labels, guarantee = parts.public_labels, None
    if arm == "names":
        return {"accuracy": _share((parts.test @ parts.names.T).argmax(1), parts.test_labels)}
    if arm in ("head", "labels"):
        assert epsilon is not None
        chosen = {"head": best(trials, NAME, "head", epsilon)}
        _, trained = train_arm(parts.private, "head", chosen, epsilon, seed=seed)
        head, guarantee = trained.params["head"], trained.guarantee
        assert guarantee is not None
        if arm == "head":
            return {
                "accuracy": _share(_predict(head, parts.test), parts.test_labels),
                "spent": guarantee.epsilon(DELTA),
            }
        labels = _predict(head, parts.public)
    if arm == "votes":
        assert epsilon is not None
        labels, guarantee = vote(parts, epsilon, groups, seed)
    classifier = LogisticRegression(C=10.0, max_iter=500).fit(parts.public, labels)
    return {
        "accuracy": 100 * classifier.score(parts.test, parts.test_labels),
        "labels": _share(labels, parts.public_labels),
        "spent": None if guarantee is None else guarantee.epsilon(DELTA),
    }


def vote(parts: Parts, epsilon: float, groups: int, seed: int) -> tuple[np.ndarray, Guarantee]:
    """Returns a label for each public text, by noisy votes of the private texts.

    The public texts form groups. A private text votes once, for its label in the nearest group, so
    it changes one count by 1.
    """
    grouped = KMeans(groups, n_init=1, random_state=seed).fit(parts.public)
    columns, classes = parts.private.head.train, parts.classes
    cells = grouped.predict(columns["inputs"]) * classes + columns["labels"]
    noise = calibrate(epsilon=epsilon, delta=DELTA, steps=1, sampling_probability=1.0)
    found = release_counts(
        {"votes": cells},
        {"votes": np.arange(groups * classes + 1)},
        noise_multiplier=noise,
        key=jax.random.key(seed),
    )
    counts = found.counts["votes"][:-1].reshape(groups, classes)
    return counts.argmax(1)[grouped.labels_], Guarantee(found.event)


def _predict(head: Params, features: np.ndarray) -> np.ndarray:
    return np.asarray(classify(head, jnp.asarray(features))).argmax(1)


def _share(found: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(np.mean(found == labels))


def _table(
    rows: Iterable[dict[str, Any]], epsilons: tuple[float, ...], parts: Parts, seeds: int
) -> str:
    """Returns a table of accuracies in percent, ± their standard deviation over seeds."""
    body = []
    for arm, title in ARMS.items():
        cells = []
        for epsilon in (*epsilons, None):
            found = [r["accuracy"] for r in rows if (r["arm"], r["epsilon"]) == (arm, epsilon)]
            cells.append(mean_and_deviation(found, 1) if found else "")
        body.append((title, *cells))
    header = ("", *(f"ε = {epsilon:g}" for epsilon in epsilons), "no private text")
    return (
        f"{len(parts.private.head.owners):,} private texts; {len(parts.public):,} public ones; "
        f"{len(parts.test):,} others for tests; δ = 1e-5; {seeds} seeds. Test accuracy in percent, "
        f"mean ± standard deviation.\n\n{files.markdown_table(header, body)}\n"
    )
