"""Tests of the figure of a comparison: accuracies and differences from DP-SGD."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure

from dpoptax.training.search import comparison_figure
from dpoptax.training.search.results import ComparisonResult, GridPoint, MethodResult

pytestmark = pytest.mark.slow


def _results(names, seeds=3, rates=(0.5, 1.0)):
    methods = []
    for index, name in enumerate(names):
        accuracies = [0.8 + 0.01 * index + 0.02 * seed for seed in range(seeds)]
        history = [[{"step": s, "test_accuracy": a * s / 10} for s in (0, 10)] for a in accuracies]
        methods.append(
            MethodResult(
                name=name,
                config=name,
                private=name != "Non-private",
                unproven=None,
                epsilon=None,
                learning_rate=rates[0],
                test_score_mean=float(np.mean(accuracies)),
                test_score_std=None,
                seconds_per_run=1.0,
                grid=[GridPoint(rate, accuracies) for rate in rates],
                runs=[
                    {"test_accuracy": a, "history": h}
                    for a, h in zip(accuracies, history, strict=True)
                ],
                scores=accuracies,
            )
        )
    return ComparisonResult("digits", 1.0, 1e-5, list(range(seeds)), [], methods, {}, "")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def draw(results):
        comparison_figure.plot_comparison(results, tmp_path / "comparison.png")
        return figures[-1]

    return draw


def _texts(axes):
    return [text.get_text() for text in axes.texts]


def test_differences_are_from_dp_sgd_at_any_position(drawn):
    figure = drawn(_results(["DP-AdamBC", "DP-SGD", "DiSK", "Non-private"]))
    (left,) = figure.get_axes()
    assert _texts(left) == ["82.0   −1.0 ± 0.0", "83.0", "84.0   +1.0 ± 0.0", "85.0   +2.0 ± 0.0"]
    assert "difference from DP-SGD" in left.get_title()


def test_plots_one_rate_and_one_seed(drawn):
    results = _results(["A", "B"], seeds=1, rates=(1.0,))
    (left,) = drawn(results).get_axes()
    assert "difference from A" in left.get_title()
    assert _texts(left) == ["80.0", "81.0   +1.0"]


def test_every_score_is_inside_the_axes(drawn):
    (axes,) = drawn(_results([f"method {i}" for i in range(12)])).get_axes()
    low, high = axes.get_xlim()
    for line in axes.lines:
        assert low <= min(line.get_xdata()) <= max(line.get_xdata()) <= high


def test_title_omits_epsilon_without_privacy(drawn):
    results = dataclasses.replace(_results(["Non-private"]), delta=None)
    assert "without privacy" in drawn(results).get_suptitle()
