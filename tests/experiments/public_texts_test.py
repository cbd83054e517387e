"""Tests that private texts label public ones, at the stated price, on made-up features."""

import numpy as np
import pytest

from experiments.run_once import read_lines
from experiments.text import public_texts
from experiments.text.arms import Problems
from experiments.text.public_texts import Parts, vote
from experiments.text.texts import TOPICS
from experiments.text.training import Problem
from experiments.transfer.training import DELTA

CLASSES, WIDTH = 4, 8


def columns(size, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=size).astype(np.int32)
    inputs = 3 * np.eye(CLASSES, WIDTH)[labels] + rng.normal(size=(size, WIDTH))
    return {"inputs": inputs.astype(np.float32), "labels": labels}


def embed(model, texts, lengths, folder):
    """Returns features by class, as the topics come in files of texts."""
    spread = 0.1 * np.random.default_rng(2).normal(size=(len(texts), WIDTH))
    pooled = np.eye(CLASSES, WIDTH)[np.arange(len(texts)) % CLASSES] + spread
    return type("Features", (), {"pooled": pooled.astype(np.float32)})


def problem():
    return Problem(columns(2000, 0), np.arange(2000), columns(400, 1), CLASSES)


def test_votes_label_groups_for_the_stated_price():
    whole = problem()
    test = whole.test["inputs"], whole.test["labels"]
    parts = Parts(Problems(whole, whole), *test, *test, np.eye(CLASSES, WIDTH))
    labels, guarantee = vote(parts, 1.0, 16, 0)
    assert np.mean(labels == whole.test["labels"]) > 0.85
    assert 0.99 < guarantee.epsilon(DELTA) <= 1.0
    noisy, guarantee = vote(parts, 0.01, 16, 0)
    assert np.mean(noisy == whole.test["labels"]) < 0.7
    assert guarantee.epsilon(DELTA) <= 0.01


@pytest.mark.slow
def test_recipe_lists_arms_and_repeats_no_run(tmp_path, monkeypatch):
    whole = problem()
    monkeypatch.setattr(public_texts, "fetch_minilm", lambda folder: folder)
    monkeypatch.setattr(public_texts, "read_texts", lambda name, folder: None)
    monkeypatch.setattr(public_texts, "problems", lambda *args: Problems(whole, whole))
    monkeypatch.setattr(public_texts, "cached_features", embed)
    output = tmp_path / "runs.jsonl"
    given = {"data_dir": tmp_path, "epsilons": (2.0,), "seeds": 2, "groups": 8, "output": output}
    page = public_texts.run(**given)
    found = read_lines(output)
    assert [row["arm"] for row in found] == 2 * list(public_texts.ARMS)
    assert all(row["spent"] is None or row["spent"] <= 2.0 for row in found if "spent" in row)
    accuracies = {row["arm"]: row["accuracy"] for row in found}
    assert accuracies["own"] > 90
    assert accuracies["labels"] > 80
    assert page.count("|") > 20
    assert "2,000 private texts; 200 public ones; 200 others for tests" in page
    assert public_texts.run(**given) == page
    assert len(read_lines(output)) == len(found)
    sampled = tmp_path / "sampled.tsv"
    sampled.write_text("".join(f"text {i}\t{TOPICS[i % CLASSES]}\n" for i in range(80)))
    assert "80 public ones; 200 others for tests" in public_texts.run(**given, texts=sampled)
    again = read_lines(output)[len(found) :]
    assert [row["arm"] for row in again] == [row["arm"] for row in found]
