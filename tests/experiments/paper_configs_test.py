"""Tests of the papers' tables as configs: all load, match the papers and train."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import dpoptax
from dpoptax.training import ConfigError, config_of, load_config, load_configs, train_and_evaluate
from dpoptax.training.cli.main import main
from experiments.config import load_experiments, settings_of
from experiments.data import PUBLISHED
from experiments.methods import CorrelatedNoise
from experiments.models import MODELS
from experiments.models.published_models import PUBLISHED_MODELS
from tests.published_data import write_cifar, write_mnist
from tests.published_texts import GLUE_FILES, write_glue, write_published_model

PAPERS = Path(__file__).parents[2] / "configs" / "papers"
ROWS = {
    f"{path.parent.name}/{path.stem}:{name}": config
    for path in sorted(PAPERS.glob("*/*.py"))
    for name, config in load_experiments(path).items()
}
GEODP = PAPERS / "geodp" / "figure_5.py"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_mnist(folder / "mnist")
    write_mnist(folder / "fashion_mnist")
    write_cifar(folder, 10, per_file=4)
    write_cifar(folder, 100, per_file=20)
    for task in GLUE_FILES:
        write_glue(folder, task)
    write_published_model(folder / "roberta")
    return folder


def of_texts(row):
    return PUBLISHED[row.dataset].kind != "images"


def shortened(config, data_dir, **changes):
    """Returns a two-step version of a config on few examples, with noise that gives a finite ε."""
    if isinstance(config.method, CorrelatedNoise):
        changes["method"] = dataclasses.replace(config.method, bands=2)  # groups of ten examples
    if of_texts(config):
        changes |= {
            "model": "roberta_base",
            "pretrained": data_dir / "roberta",
            "sequence_length": 12,
        }
    return dataclasses.replace(
        config,
        data_dir=data_dir,
        steps=2,
        batch_size=4,
        microbatch_size=None,
        epsilon=None,
        delta=1e-3,
        noise_multiplier=1.0 if config.method.unproven() is None else config.noise_multiplier,
        accountant="rdp",
        **changes,
    )


@pytest.mark.parametrize("file", sorted({name.split(":")[0] for name in ROWS}))
def test_every_row_is_valid(file):
    for name, config in ROWS.items():
        if name.startswith(f"{file}:"):
            check_row(config)


def check_row(config):
    assert config.batch_size < PUBLISHED[config.dataset].train_size
    assert config.model in (*MODELS, *PUBLISHED_MODELS)
    config.method.filter(1.0)  # raises for an unknown preset or a coefficient out of range
    assert (config.sampling == "cyclic") == isinstance(config.method, CorrelatedNoise)
    if not config.method.private:
        assert config.epsilon is config.noise_multiplier is None
    else:
        # Calibrated configs use an ε of the paper. Configs with a given σ state an ε only if the
        # paper does.
        assert (config.epsilon is None) == (config.noise_multiplier is not None)


SHORT = {
    repr(dataclasses.replace(shortened(row, Path(), model="linear"), learning_rate=0.1)): name
    for name, row in ROWS.items()
}
"""One row for each run that differs after model, steps, batch and ε are reduced."""


def rows_with_every_setting():
    """Returns rows that have together every setting of a chain, on images where there is one.

    Programs on texts take longer to compile.
    """
    chosen, seen = [], set()
    for name in sorted(SHORT.values(), key=lambda name: (of_texts(ROWS[name]), name)):
        row = ROWS[name]
        settings = {
            type(row.method).__name__,
            row.clip,
            row.optimizer,
            row.schedule,
            row.sampling,
            row.parameter_ema,
        }
        if not settings <= seen:
            chosen.append(name)
            seen |= settings
    return chosen


TRAINED = {
    name: ROWS[name]
    for name in (*rows_with_every_setting(), "disk/table_1_3:roberta_base/sst2/eps-1/kf_dp_lora")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_setting_trains_two_steps(name, data_dir, tmp_path):
    config = shortened(TRAINED[name], data_dir, model="linear")
    assert train_and_evaluate(config_of(config), tmp_path, progress=False)["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset",
    sorted({row.dataset for row in ROWS.values()} - {row.dataset for row in TRAINED.values()}),
)
def test_every_other_data_set_trains_two_steps(dataset, data_dir, tmp_path):
    config = dataclasses.replace(ROWS["pmlf/table_1_3:mnist/eps-8/cnn/dp_sgd"], dataset=dataset)
    config = shortened(config, data_dir, model="linear")
    # The microbatch size also bounds the chunks of the evaluation, which are padded.
    config = config_of(config, microbatch_size=4)
    assert train_and_evaluate(config, tmp_path, progress=False)["dataset"] == dataset


@pytest.mark.slow
def test_dp_ftrl_in_fixed_order_costs_one_gaussian_per_epoch():
    row = ROWS["disk/figure_6:eps-8/dp_ftrl"]
    plan = dataclasses.replace(row, accountant="pld", noise_multiplier=5.5).task().plan
    assert plan.sampler.participation_probability == 1.0
    # 80 epochs use every example 80 times: one Gaussian mechanism with μ = √80/σ.
    mu, epsilon = 80**0.5 / 5.5, plan.epsilon
    below, above = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
    assert below - np.exp(epsilon) * above == pytest.approx(row.delta, rel=0.02)
    sampled = ROWS["disk/figure_6:eps-8/dp_ftrl_sampled"]
    assert sampled.method.cycle_length == sampled.method.strategy(sampled.steps).bands == 4


def test_figure_9_clips_whole_gradient_and_per_layer():
    clips = {
        name.split("/")[-1]: dataclasses.replace(row, noise_multiplier=1.0).task().clip
        for name, row in ROWS.items()
        if name.startswith("doppler/figure_8_9:clip/")
    }
    automatic, vanilla = dpoptax.automatic_clip(1.0), dpoptax.l2_clip(1.0)
    assert clips == {
        "auto_s": automatic,
        "l2": vanilla,
        "auto_s_per_layer": dpoptax.per_layer_clip(automatic),
        "per_layer": dpoptax.per_layer_clip(vanilla),
    }
    assert {clip.sensitivity for clip in clips.values()} == {1.0}


@pytest.mark.slow
def test_geodp_trains_and_states_no_epsilon(data_dir, tmp_path, capsys):
    row = f"{GEODP}:c/sigma-0.1/geodp_1-256"
    options = ["--data-dir", str(data_dir), "--steps", "2", "--batch-size", "4"]
    assert main(["train", row, *options, "--workdir", str(tmp_path)]) == 0
    assert "without a proven guarantee" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["private"], summary["epsilon"], summary["delta"]) == (False, None, None)
    assert "one example can turn" in summary["unproven"]
    assert summary["config"]["method"] == {"name": "GeoDP", "beta": 1.0}
    assert summary["config"]["noise_multiplier"] == 0.1


def test_tiny_noise_has_huge_epsilon():
    plan = ROWS["geodp/figure_5:c/sigma-0.01/dp-256"].task().plan
    assert plan.steps == 350
    assert plan.epsilon == pytest.approx(45_110, rel=0.01)


@pytest.mark.slow
def test_noise_free_row_clips_and_has_no_guarantee(data_dir, tmp_path):
    row = config_of(ROWS["geodp/figure_5:a/sigma-0/dp-4096"], data_dir=data_dir)
    row = row.replace(steps=2, batch_size=4, microbatch_size=None)
    summary = train_and_evaluate(row, tmp_path, progress=False)
    assert (summary["private"], summary["epsilon"]) == (False, None)
    assert "0.1" in str(summary["clip"])


def test_pattern_selects_rows():
    table = PAPERS / "pmlf" / "table_4.py"
    assert len(load_configs(table)) == 64
    assert list(load_configs(f"{table}:mnist/eps-2/filter-[12]")) == [
        "mnist/eps-2/filter-1",
        "mnist/eps-2/filter-2",
    ]
    assert settings_of(load_config(f"{table}:cifar10/eps-8/filter-8")).epsilon == 8.0
    with pytest.raises(
        ConfigError, match=r"got 64 runs .* as FILE:NAME, for example \S+:mnist/eps-2/"
    ):
        load_config(table)
    with pytest.raises(ConfigError, match=r"`config` must be one of cifar10/eps-2.* got 'svhn/\*'"):
        load_configs(f"{table}:svhn/*")


def test_refuses_unknown_clip(data_dir):
    with pytest.raises(ConfigError, match=r"`clip` must be one of .*auto_s.* got 'automatic'"):
        shortened(ROWS["pmlf/base:mnist"], data_dir, clip="automatic")
