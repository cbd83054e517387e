"""Tests of the suggested batch size, steps and noise."""

import math

import pytest

import dpoptax
from dpoptax import accounting
from dpoptax.training.cli.main import main

GIVEN = {
    "dataset_size": 5000,
    "epsilon": 2.0,
    "delta": 1e-5,
    "examples": 200_000,
    "accountant": "rdp",  # fast
}


@pytest.fixture(scope="module")
def suggestion():
    return accounting.suggest_plan(**GIVEN)


def test_every_option_spends_epsilon_and_budget(suggestion):
    for option in suggestion.options:
        plan = dpoptax.PrivacyPlan(
            dataset_size=5000,
            batch_size=option.batch_size,
            steps=option.steps,
            noise_multiplier=option.noise_multiplier,
            delta=1e-5,
            accountant="rdp",
        )
        assert 0.999 * 2.0 < plan.epsilon <= 2.0
        assert 200_000 - option.batch_size < option.batch_size * option.steps <= 200_000
        assert option.steps >= 100
        assert option.noise_batch_ratio == option.noise_multiplier / option.batch_size


def test_excess_is_relative_to_full_batches(suggestion):
    option = suggestion.options[2]
    full = accounting.calibrate(
        epsilon=2.0, delta=1e-5, steps=option.steps, sampling_probability=1.0, accountant="rdp"
    )
    assert option.excess == pytest.approx(option.noise_batch_ratio / (full / 5000) - 1, abs=1e-3)


def test_chooses_smallest_batch_near_limit(suggestion):
    excesses = [option.excess for option in suggestion.options]
    assert excesses == sorted(excesses)
    assert suggestion.chosen.excess <= 0.1
    after = suggestion.options[suggestion.options.index(suggestion.chosen) + 1]
    assert after.excess > 0.1
    stricter = accounting.suggest_plan(**GIVEN, max_excess=0.04)
    assert stricter.chosen.batch_size > suggestion.chosen.batch_size


def test_says_that_a_budget_is_below_one_epoch(suggestion):
    few = accounting.suggest_plan(**GIVEN | {"examples": 2000}, min_steps=10)
    epochs = few.chosen.batch_size * few.chosen.steps / 5000
    assert f"uses an example {epochs:.2g} times on average" in str(few)
    assert "times on average" not in str(suggestion)


@pytest.mark.slow
def test_chooses_least_noise_if_budget_is_small():
    small = accounting.suggest_plan(**GIVEN | {"dataset_size": 1_000_000, "delta": 1e-7})
    assert small.chosen == small.options[0]
    assert small.chosen.noise_batch_ratio == min(o.noise_batch_ratio for o in small.options)
    gain = small.chosen.excess / (1 + small.chosen.excess)
    assert f"by at most {math.ceil(1000 * gain) / 10:g} %" in str(small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_size": 1}, "`dataset_size` must be an integer of at least 2"),
        ({"examples": 99}, "`examples` must be finite and at least `min_steps`, 100"),
        ({"examples": math.inf}, "`examples` must be finite"),
        ({"min_steps": 0}, "`min_steps` must be an integer of at least 1"),
        ({"max_excess": 0}, "`max_excess` must be positive"),
        ({"epsilon": 0}, "`epsilon` must be positive"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        accounting.suggest_plan(**GIVEN | change)


def chosen(capsys, *options):
    assert main(["plan", *options]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(">"))


@pytest.mark.slow
def test_command_suggests_with_and_without_config(capsys, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "from experiments.config import ExperimentConfig\n"
        "RUN = ExperimentConfig(model='linear', batch_size=64, steps=500, epsilon=2.0)\n"
        "def get_configs():\n"
        "    return {'run': RUN}\n"
    )
    of_config = chosen(capsys, str(path), "--suggest")
    numbers = ["--dataset-size", "1438", "--epsilon", "2", "--delta", "1e-5"]
    assert chosen(capsys, "--suggest", *numbers, "--examples", "32000") == of_config
    # About 12 operations for each of 650 parameters and each example: see planning_test.
    traced = ["--flops", f"{32000 * 650 * 12}"]
    assert chosen(capsys, str(path), "--suggest", *traced).split()[1] in ("32", "64", "128")
    assert main(["plan", "--suggest", *numbers]) == 2
    assert "Pass --examples or --flops." in capsys.readouterr().err
    assert main(["plan", "--suggest", *numbers, "--flops", "1e9"]) == 2
    assert "`--flops` needs" in capsys.readouterr().err
