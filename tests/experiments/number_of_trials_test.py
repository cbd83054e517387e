"""Tests of the comparison of distributions of the number of trials."""

import re
from pathlib import Path

import numpy as np
import pytest

from dpoptax.accounting import selection
from experiments.command_line import main
from experiments.reports.number_of_trials import chance


@pytest.mark.parametrize("distribution", selection.SHAPES)
def test_chance_is_that_of_drawn_numbers(distribution):
    numbers = [selection.draw_number(6.0, distribution, seed) for seed in range(4000)]
    found = np.mean(1 - 0.9 ** np.array(numbers))
    assert abs(chance(6.0, distribution) - found) < 0.02


def test_geometric_number_needs_least_noise(capsys):
    assert main(["number-of-trials", "--chances", "0.7"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    noise = {row[2].strip(): float(row[4]) for row in rows}
    assert set(noise) == {"fixed", *selection.SHAPES}
    assert min(noise, key=noise.get) == "geometric"


RECORD = Path(__file__).parents[2] / "experiments/results/accounting.md"


@pytest.mark.slow
def test_savings_are_recorded(capsys):
    assert main(["savings", "--rows", "1"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[2:]
    assert re.sub(" +", " ", row) in RECORD.read_text("utf-8")


@pytest.mark.slow
def test_several_records_are_recorded(capsys, tmp_path):
    """Users with related records need the most noise in the first setting, unrelated ones less."""
    figure = tmp_path / "noise.png"
    assert main(["several-records", "--rows", "1", "--figure", str(figure)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert all(re.sub(" +", " ", row) in RECORD.read_text("utf-8") for row in rows)
    noise = np.array([[float(cell) for cell in row.split("|")[7:-1]] for row in rows])
    group, records, alike, unrelated, few = noise
    assert np.all((few < unrelated) & (unrelated < records) & (records < alike))
    assert np.all(records <= group)
    assert figure.stat().st_size > 0
