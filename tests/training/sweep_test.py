"""Tests of sweeps: trials, the price of the result, and resuming after a kill."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import dp_accounting as dpa
import numpy as np
import optax
import pytest
from dpoptax.training.methods import DPSGD, Doppler, Method, NonPrivate
from dpoptax.training.roles import Role, field
from flax import serialization

from dpoptax.accounting import selection
from dpoptax.matrix import BandedToeplitz
from dpoptax.runs import OtherRunError
from dpoptax.training import Comparison, ConfigError, TrainConfig, compare
from dpoptax.training.cli.main import main
from dpoptax.training.data.dataset import DATASETS
from dpoptax.training.run import checkpoints, records, step
from dpoptax.training.search import settings, trials
from dpoptax.training.search import sweep as sweep_module
from dpoptax.training.search.price import Sweep
from dpoptax.training.search.sweep import dry_run, prepare, run_sweep, table
from dpoptax.training.search.trials import Runner, Trial
from experiments.methods import GeoDP
from tests.helpers import event_epsilon

TINY = TrainConfig(model="linear", steps=3, batch_size=64, eval_every=1, accountant="rdp", seed=0)
CONFIGS = {"tiny": TINY}
CONFIG_FILE = """
from dpoptax.training import TrainConfig

def get_config():
    return TrainConfig(model="linear", steps=3, batch_size=64, eval_every=1, accountant="rdp")
"""


def sweep(workdir, **changes):
    given = {"grid": ("learning_rate=0.5,1", "l2_clip_norm=0.1,1"), "repetitions": "fixed"}
    return Sweep(workdir=workdir, **{**given, **changes})


@pytest.fixture(scope="module", autouse=True)
def seed():
    """The seed of new sweeps, which tests may change."""
    chosen = {"seed": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_module.secrets, "randbits", lambda bits: chosen["seed"])
        yield chosen


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sweep") / "out"
    return workdir, run_sweep(CONFIGS, sweep(workdir), progress=False)


def records_of(workdir, row):
    return json.loads((workdir / "trials" / row.record).read_text())


def test_grid_has_all_combinations_once(finished):
    workdir, results = finished
    tried = [
        (row.settings["learning_rate"], row.settings["l2_clip_norm"]) for row in results.trials
    ]
    assert tried == [(0.5, 0.1), (0.5, 1.0), (1.0, 0.1), (1.0, 1.0)]
    records = [json.loads((workdir / "trials" / row.record).read_text()) for row in results.trials]
    assert len({record["config"]["seed"] for record in records}) == 4
    assert [r["config"]["learning_rate"] for r in records] == [rate for rate, _ in tried]
    assert {record["dataset_size"] for record in records} == {1438 - 287}


def test_publishes_parameters_of_best_trial(finished):
    workdir, results = finished
    best = results.trials[results.best]
    assert best.score == max(row.score for row in results.trials)
    params = (workdir / "best" / "params.msgpack").read_bytes()
    assert params == (workdir / "trials" / best.record).with_suffix(".msgpack").read_bytes()
    summary = json.loads((workdir / "best" / "summary.json").read_text())
    assert "seed" not in summary["config"]
    assert summary["epsilon"] == results.price.epsilon
    dataset = trials.dataset_of(TINY, held_out=False)
    dense = serialization.msgpack_restore(params)["Dense_0"]
    logits = dataset.test["inputs"].reshape(-1, 64) @ dense["kernel"] + dense["bias"]
    right = np.mean(logits.argmax(-1) == dataset.test["labels"])
    assert summary["test_accuracy"] == pytest.approx(right, abs=1e-6)


def test_result_has_a_statement_of_the_whole_sweep(finished):
    workdir, results = finished
    summary = json.loads((workdir / "best" / "summary.json").read_text())
    assert list(summary)[:2] == ["epsilon", "delta"]
    assert summary["epsilon_of_one_trial"] == results.price.of_one_trial < summary["epsilon"]
    assert "epsilon" not in summary["config"]
    text = (workdir / "best" / "statement.txt").read_text("utf-8")
    assert f"({records.epsilon_text(summary['epsilon'])[:3]}" in text
    model = (workdir / "best" / "params.msgpack").read_bytes()
    assert f"params.msgpack, SHA-256 of the file: {hashlib.sha256(model).hexdigest()}" in text
    assert "the best of a fixed number of trials, which the numbers include" in text


def test_command_shows_no_secret_of_a_random_number_of_trials(tmp_path, capsys, seed):
    seed["seed"] = 3
    (tmp_path / "tiny.py").write_text(CONFIG_FILE)
    options = ["--grid", "learning_rate=1,2", "--trials", "2", "--workdir", str(tmp_path / "out")]
    assert main(["sweep", str(tmp_path / "tiny.py"), *options]) == 0
    told = capsys.readouterr()
    assert "held-out accuracy" not in told.out
    assert "geometric number of trials with mean 2" in told.out
    assert "trials.md lists all trials. Keep it secret." in told.out
    *_, number, folder = told.err.splitlines()
    assert number.endswith("2 on average, and at most 5 with a probability of 95 %")
    assert folder == f"dpoptax: finished ones appear in {tmp_path / 'out' / 'trials'} ..."
    text = (tmp_path / "out" / "best" / "statement.txt").read_text("utf-8")
    assert "about the best of several trainings. Their number was drawn at random" in text
    assert "How many trainings were tried, how long they took," in text
    assert "A computer rounds." in text
    assert "which examples were held out for this choice, and ____" in text


def test_only_owner_can_read_seeds_of_trials(finished):
    """Only the owner can read the seeds, because a seed reproduces the noise of its trial."""
    workdir, _ = finished
    for name in ("sweep.json", "trials"):
        assert (workdir / name).stat().st_mode & 0o077 == 0
    assert not list(workdir.glob("*.partial"))


def test_prices_all_trials_together_and_adds_noise_to_scores(finished):
    workdir, results = finished
    price = results.price
    record = records_of(workdir, results.trials[0])
    plan = sweep_module.make_run_plan(TINY, 1151)
    event = dpa.SelfComposedDpEvent(plan.sampler.dp_event(record["noise_multiplier"], 3), 4)
    composed = event_epsilon(event, 1e-5, accountant="rdp")
    held_out = event_epsilon(
        dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(price.score_stddev), 4),
        1e-5,
        accountant="rdp",
    )
    assert price.epsilon == pytest.approx(composed, rel=1e-9)
    assert 0.9 * composed < held_out <= composed
    assert price.of_one_trial <= 3.0 < composed
    exact = [records_of(workdir, row)["test_accuracy"] for row in results.trials]
    errors = 287 * (np.array([row.score for row in results.trials]) - exact)
    assert 0.2 * price.score_stddev < np.abs(errors).max() < 4 * price.score_stddev
    assert "may be published. trials/ and" in table(results)


def test_finished_sweep_trains_nothing_and_refuses_changes(finished, monkeypatch):
    workdir, results = finished
    monkeypatch.setattr(trials, "train", None)
    for seed in (0, None):  # the config's seed, which no trial uses
        configs = {"tiny": dataclasses.replace(TINY, seed=seed)}
        again = run_sweep(configs, sweep(workdir), progress=False)
        assert again.result == results.result
    with pytest.raises(ConfigError, match="another workdir"):
        run_sweep(CONFIGS, sweep(workdir, grid=("learning_rate=1,2",)), progress=False)


def test_refuses_trials_with_other_noise_than_priced(finished, tmp_path, monkeypatch):
    """A sweep does not go on if another version of the accounting calibrates other noise."""
    shutil.copytree(finished[0], tmp_path / "out")
    plan = sweep_module.make_run_plan

    def calibrated_otherwise(*args):
        found = plan(*args)
        return dataclasses.replace(found, noise_multiplier=1.1 * found.noise_multiplier)

    monkeypatch.setattr(sweep_module, "make_run_plan", calibrated_otherwise)
    with pytest.raises(OtherRunError, match="The noise of each trial must be the same as in"):
        run_sweep(CONFIGS, sweep(tmp_path / "out"), progress=False)


@dataclasses.dataclass(frozen=True)
class Bands(Method):
    """Noise more correlated than its fields state, as if written by another version."""

    name = "Bands"
    by = 0.5

    weight: float = field(0.0, Role.UNPRICED)  # this role is wrong on purpose

    @property
    def cycle_length(self):
        return 2

    def strategy(self, steps):
        return BandedToeplitz((1.0, self.by + self.weight))


CORRELATED = dataclasses.replace(
    TINY, method=Bands(), epsilon=None, noise_multiplier=1.0, sampling="cyclic"
)


def test_refuses_trials_with_other_strategy_than_priced(tmp_path, monkeypatch):
    """Both strategies have the same given noise multiplier."""
    given = {"grid": ("learning_rate=0.5,1",)}
    run_sweep({"one": CORRELATED}, sweep(tmp_path, **given), progress=False)
    monkeypatch.setattr(Bands, "by", 0.25)
    with pytest.raises(OtherRunError, match="(step|trial) must be the same as in the sweep"):
        run_sweep({"one": CORRELATED}, sweep(tmp_path, **given), progress=False)


@pytest.mark.parametrize("values", ["0.0,0.25", "uniform:0.01:0.25"])
def test_refuses_unpriced_role_of_field_that_affects_noise(tmp_path, values):
    given = {"grid": (), "repetitions": "geometric", "trials": 8}
    drawn = sweep(tmp_path, random=(f"method.weight={values}",), **given)
    with pytest.raises(ConfigError, match=r"field of Bands .* Role\.UNPRICED"):
        prepare({"one": CORRELATED}, drawn, 3)
    prepare({"one": CORRELATED}, sweep(tmp_path, random=("method.weight=0.25",), **given), 3)


def test_in_order_trials_use_whole_groups(tmp_path):
    given = {"grid": ("sampling=in_order",)}
    results = run_sweep(CONFIGS, sweep(tmp_path, **given), progress=False)
    assert records_of(tmp_path, results.trials[0])["dataset_size"] == 1151 // 64 * 64


def start_process():
    """Forgets data and programs, as a new process does."""
    for cache in (trials._loaded, trials._sum_identity, step._shared_digest, step._compile):
        cache.cache_clear()


@dataclasses.dataclass(frozen=True)
class Edited(DPSGD):
    """A user's method, whose loss and filter are edited between two commands."""

    factor: ClassVar[float] = 1.0

    def loss(self, loss_fn):
        return lambda *args: self.factor * loss_fn(*args)

    def filter(self, stddev):
        return optax.scale(self.factor)


def trial_seeds(workdir):
    found = (json.loads(path.read_text()) for path in (workdir / "trials").glob("*.json"))
    return {record["config"]["seed"] for record in found}


@pytest.mark.parametrize("kept", [True, False])
def test_refuses_to_resume_sweep_with_an_edited_loss(kept, tmp_path, monkeypatch):
    """Equal seeds would add the same noise to two sums, and the difference would have none."""
    configs = {"one": dataclasses.replace(TINY, method=Edited())}
    one_trial = {"grid": ("learning_rate=1",)}
    first = run_sweep(configs, sweep(tmp_path, **one_trial), progress=False)
    before = trial_seeds(tmp_path)
    monkeypatch.setattr(Edited, "factor", -1.0)
    start_process()
    if not kept:
        shutil.rmtree(tmp_path / "trials")
    with pytest.raises(OtherRunError, match="The training step must be the same as in the sweep"):
        run_sweep(configs, sweep(tmp_path, **one_trial), progress=False)
    # A sweep that starts anew has other noise, even with the same seed.
    (tmp_path / "sweep.json").unlink()
    again = run_sweep(configs, sweep(tmp_path, **one_trial), progress=False)
    assert again.trials[0].record != first.trials[0].record
    assert trial_seeds(tmp_path) - before
    monkeypatch.undo()
    start_process()


def test_comparison_trains_an_edited_filter_again(tmp_path, monkeypatch):
    configs = {"one": dataclasses.replace(TINY, method=Edited())}
    given = Comparison(tmp_path, seeds=1, factors=(1.0,))
    first = compare(configs, given, progress=False)
    start_process()
    assert compare(configs, given, progress=False) == first
    monkeypatch.setattr(Edited, "factor", -1.0)
    start_process()
    edited = compare(configs, given, progress=False)
    assert edited.methods[0].runs[0]["params_sha256"] != first.methods[0].runs[0]["params_sha256"]
    monkeypatch.undo()
    start_process()


@pytest.mark.parametrize("place", [0, 4])
def test_refuses_to_resume_sweep_with_other_examples(tmp_path, monkeypatch, place):
    """Changes a training example and a held-out example; ε does not cover two data sets."""
    whole = trials.dataset_of(TINY, held_out=False)
    held_out = trials.dataset_of(TINY, held_out=True)
    assert (whole.train["inputs"][place] == held_out.test["inputs"][0]).all() == (place == 4)
    configs = {"one": dataclasses.replace(TINY, dataset="own")}
    given = {"grid": ("learning_rate=0.5,1",)}
    for replaced in (False, True):
        inputs = whole.train["inputs"].copy()
        inputs[place] *= 0.5 if replaced else 1
        train = {**whole.train, "inputs": inputs}
        own = dataclasses.replace(whole, name="own", train=train)
        monkeypatch.setitem(DATASETS, "own", lambda found=own: found)
        start_process()
        if replaced:
            with pytest.raises(OtherRunError, match="examples must be the same as in the sweep"):
                run_sweep(configs, sweep(tmp_path, **given), progress=False)
        else:
            first = run_sweep(configs, sweep(tmp_path, **given), progress=False)
            assert run_sweep(configs, sweep(tmp_path, **given), progress=False) == first


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_refuses_to_resume_comparison_with_other_examples(tmp_path, monkeypatch, split):
    whole = trials.dataset_of(TINY, held_out=False)
    configs = {"one": dataclasses.replace(TINY, dataset="own")}
    given = Comparison(tmp_path, seeds=1, factors=(1.0,))

    def compared(**changes):
        own = dataclasses.replace(whole, name="own", **changes)
        monkeypatch.setitem(DATASETS, "own", lambda: own)
        start_process()
        return compare(configs, given, progress=False)

    first = compared()
    assert (tmp_path / "data.json").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(trials, "train", None)
    assert compared() == first
    arrays = dict(getattr(whole, split))
    arrays["labels"] = np.roll(arrays["labels"], 1)
    with pytest.raises(OtherRunError, match=r"examples must be the same as in earlier runs"):
        compared(**{split: arrays})
    assert compared() == first


def test_only_one_process_runs_a_sweep(tmp_path, monkeypatch):
    """Only one process trains; two would release results under separate seeds and ε."""
    out = tmp_path / "out"
    one_trial = {"grid": ("learning_rate=1",)}
    real = sweep_module.prepare

    def meanwhile(*args, **options):
        with pytest.raises(checkpoints.CheckpointError, match="in use by another process"):
            run_sweep(CONFIGS, sweep(out, **one_trial), progress=False)
        return real(*args, **options)

    monkeypatch.setattr(sweep_module, "prepare", meanwhile)
    results = run_sweep(CONFIGS, sweep(out, **one_trial), progress=False)
    assert len(list((out / "trials").glob("*.json"))) == 1
    assert len(results.trials) == 1


def test_only_owner_can_read_random_number_of_trials(tmp_path, seed):
    seed["seed"] = 3
    given = {"trials": 2, "repetitions": "poisson"}
    results = run_sweep(CONFIGS, sweep(tmp_path, **given), progress=False)
    seed["seed"] = 1
    assert results.trials
    for name in ("trials.md", "sweep.json", "trials"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_interrupted_sweep_resumes(finished, tmp_path, monkeypatch):
    _, expected = finished
    started = []
    real = trials.train

    def interrupted(config, *rest, **options):
        started.append(config.learning_rate)
        if len(started) == 3:
            raise KeyboardInterrupt
        return real(config, *rest, **options)

    monkeypatch.setattr(trials, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(CONFIGS, sweep(tmp_path / "out"), progress=False)
    results = run_sweep(CONFIGS, sweep(tmp_path / "out"), progress=False)
    assert len(started) == 3 + 2
    assert results.trials == expected.trials
    assert results.result == expected.result


@pytest.mark.slow
def test_random_number_of_trials_costs_less(tmp_path):
    fixed = prepare(CONFIGS, sweep(tmp_path, trials=30), 0)[2]
    for distribution in selection.SHAPES:
        _, chosen, random, _ = prepare(
            CONFIGS, sweep(tmp_path, trials=30, repetitions=distribution), 5
        )
        assert len(chosen) == selection.draw_number(30, distribution, sweep_seed(5, "number"))
        assert random.epsilon < fixed.epsilon


def sweep_seed(seed, use):
    from dpoptax.training.search.sweep import _seed

    return _seed(seed, use)


def test_random_trials_cost_as_much_as_costliest_setting(tmp_path):
    """The price covers the costliest config even if it was not drawn."""
    small = dataclasses.replace(TINY, epsilon=None, noise_multiplier=2.0)
    configs = {"small": small, "large": dataclasses.replace(small, batch_size=512)}
    given = {"grid": (), "repetitions": "geometric", "trials": 2}
    drawn = sweep(tmp_path, random=("learning_rate=log:0.1:10",), **given)
    price = [
        prepare(chosen, drawn, 3)[2].epsilon
        for chosen in (configs, {"large": configs["large"]}, {"small": small})
    ]
    assert price[0] == pytest.approx(price[1], rel=1e-9)
    assert price[1] > price[2]
    listed = sweep(tmp_path, **{**given, "grid": ("batch_size=64,512",)})
    assert prepare({"small": small}, listed, 3)[2].epsilon == price[0]
    for values in ("int:32:64", "64,512"):
        with pytest.raises(ConfigError, match="`batch_size` must not be drawn .* --grid"):
            prepare(configs, sweep(tmp_path, random=(f"batch_size={values}",), **given), 3)


def test_sweep_without_guarantee_states_no_epsilon(tmp_path):
    for method, reason in ((NonPrivate(), "without privacy"), (GeoDP(), "not a mean")):
        noise = 1.0 if method.private else None
        config = dataclasses.replace(TINY, method=method, noise_multiplier=noise)
        _, _, price, guarantee = prepare({"one": config}, sweep(tmp_path), 0)
        assert (price.epsilon, guarantee) == (None, None)
        assert reason in price.reason


def test_random_settings_stay_in_range():
    given = ("learning_rate=log:0.1:10", "steps=int:2:4", "optimizer=sgd,adam", "delta=1e-5")
    drawn = settings.random_candidates(CONFIGS, given, 200, np.random.default_rng(0))
    rates = np.log10([candidate.config.learning_rate for candidate in drawn])
    assert rates.min() > -1
    assert rates.max() < 1
    assert abs(rates.mean()) < 0.15
    assert {candidate.config.steps for candidate in drawn} == {2, 3, 4}
    assert {candidate.config.optimizer for candidate in drawn} == {"sgd", "adam"}


def test_grid_may_vary_fields_of_method():
    configs = {"one": dataclasses.replace(TINY, method=Doppler())}
    found = settings.grid_candidates(configs, ("method.preset=momentum,none", "batch-size=64"))
    assert [candidate.config.method.preset for candidate in found] == ["momentum", "none"]
    assert found[0].config.batch_size == 64


def test_error_lists_only_valid_settings():
    configs = {"one": TrainConfig(method=Doppler())}
    with pytest.raises(ConfigError, match="got 'no_such'") as raised:
        settings.grid_candidates(configs, ("no_such=1",))
    offered = str(raised.value).split("one of ")[1].split(", ")
    assert {"steps", "method.preset"} <= set(offered)
    assert not {"method", "seed"} & set(offered)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ("learning_rat=1",)}, "got 'learning_rat'. Did you mean 'learning_rate'"),
        ({"grid": ("seed=1,2",)}, "got 'seed'."),
        (
            {"grid": ("learning_rate",)},
            "must have the form FIELD=VALUE,VALUE,..., got 'learning_rate'",
        ),
        ({"grid": ("=1",)}, "must have the form FIELD=VALUE,VALUE,..., got '=1'"),
        ({"grid": ("steps=1", "steps=2")}, "must name each field once"),
        ({"grid": ("learning_rate=1,-1",)}, "`learning_rate` must be positive and finite, got -1"),
        ({"grid": ("dataset=digits,mnist",)}, "`dataset` must be the same for all trials"),
        ({"grid": (), "random": ("learning_rate=log:2:1",), "trials": 2}, "must be a range"),
        ({"grid": (), "random": ("learning_rate=log:0:1",), "trials": 2}, "LOW above 0"),
        ({"grid": (), "random": ("learning_rate=1,2",)}, "Pass --trials"),
        ({"repetitions": "geometric"}, "Pass --trials"),
        ({"grid": ()}, "Pass --grid or --random"),
        ({"random": ("steps=1",)}, "Pass --grid or --random"),
        ({"repetitions": "often"}, "`repetitions` must be"),
        ({"trials": 0}, "`trials` must be at least 1, got 0."),
    ],
)
def test_refuses_bad_sweeps(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        run_sweep(CONFIGS, sweep(tmp_path / "out", **changes), progress=False)
    # A corrected command may use the same directory.
    assert not (tmp_path / "out" / "sweep.json").exists()


def test_refuses_unlabeled_held_out_examples(tmp_path, monkeypatch):
    """Unlabeled examples are refused: with few labels, one moves the accuracy beyond its noise."""
    whole = trials.dataset_of(TINY, held_out=True)
    test = {**whole.test, "labels": np.where(np.arange(287) < 286, -1, whole.test["labels"])}
    other = dataclasses.replace(whole, test=test)
    monkeypatch.setattr(sweep_module, "dataset_of", lambda *args, **options: other)
    with pytest.raises(ConfigError, match="negative labels"):
        prepare(CONFIGS, sweep(tmp_path), 0)


def test_refuses_monte_carlo_price_of_all_trials(tmp_path):
    """The error precedes planning, which may take minutes."""
    configs = {"one": dataclasses.replace(TINY, accountant="monte_carlo")}
    with pytest.raises(ConfigError, match="Use accountant='pld', or use random repetitions"):
        prepare(configs, sweep(tmp_path), 0)


def test_record_path_depends_on_config_split_and_code(tmp_path):
    trial = Trial(dataclasses.replace(TINY, seed=3))
    runner, other = Runner(tmp_path, made_by="a"), Runner(tmp_path, made_by="b")
    assert runner.path(trial) == runner.path(Trial(dataclasses.replace(TINY, seed=3)))
    different = [
        Trial(dataclasses.replace(TINY, seed=4)),
        Trial(dataclasses.replace(TINY, seed=3), held_out=True),
    ]
    paths = {runner.path(trial), *map(runner.path, different), other.path(trial)}
    assert len(paths) == 4


def test_refuses_trial_without_seed_or_on_many_hosts():
    with pytest.raises(ConfigError, match="one process"):
        Trial(dataclasses.replace(TINY, parallel="hosts"))


OWN_PARTS = """
import dataclasses, multiprocessing, os
import numpy as np
from dpoptax.training import TrainConfig
from dpoptax.training import Dataset, register_dataset
from dpoptax.training.methods import Method
from dpoptax.training import register_model
from dpoptax.training.models import MLP

@register_dataset
def sensors():
    {on_load}
    labels = np.arange(200, dtype=np.int32) % 2
    inputs = np.repeat(labels[:, None], 3, axis=1).astype(np.float32)
    return Dataset("sensors", {{"inputs": inputs, "labels": labels}}, {{}}, 2).for_selection()

@dataclasses.dataclass(frozen=True)
class Mine(Method):
    name = "mine"

register_model("narrow", lambda num_classes: MLP(num_classes, widths=(2,)))

def get_config():
    {in_function}
    return TrainConfig(
        method=Mine(), dataset="sensors", model="narrow", steps=2, batch_size=20, accountant="rdp"
    )
"""


def compare_own_parts(folder, on_load="pass", in_function="pass", processes="2"):
    """Compares a config file with custom parts on two processes; returns the exit code."""
    (folder / "own.py").write_text(OWN_PARTS.format(on_load=on_load, in_function=in_function))
    options = ["--seeds", "2", "--factors", "0.1", "1", "--processes", processes]
    return main(["compare", str(folder / "own.py"), *options, "--workdir", str(folder / "out")])


@pytest.mark.slow
def test_workers_know_definitions_of_config_file_and_give_same_result(tmp_path):
    assert compare_own_parts(tmp_path) == 0
    (method,) = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert method["name"] == "mine"
    shutil.rmtree(tmp_path / "out")
    assert compare_own_parts(tmp_path, processes="1") == 0
    (alone,) = json.loads((tmp_path / "out" / "results.json").read_text())["methods"]
    assert method["learning_rate"] == alone["learning_rate"]
    assert method["test_accuracy_mean"] == pytest.approx(alone["test_accuracy_mean"])
    assert [run["config"]["dataset"] for run in method["runs"]] == ["sensors"] * 2
    assert {run["config"]["method"]["class"] for run in method["runs"]} == {"own.Mine"}


def test_refuses_config_that_workers_cannot_import(tmp_path, capsys):
    local = "Mine = dataclasses.make_dataclass('Mine', [], bases=(globals()['Mine'],), frozen=True)"
    assert compare_own_parts(tmp_path, in_function=local) == 2
    message = capsys.readouterr().err
    assert "must be importable by worker processes" in message
    assert "or set processes=1." in message


@pytest.mark.slow
def test_dead_worker_ends_command_with_remedy(tmp_path, capsys):
    dies = "multiprocessing.parent_process() and os._exit(1)"
    assert compare_own_parts(tmp_path, on_load=dies) == 2
    assert "One of 2 worker processes died" in capsys.readouterr().err


def test_drawn_values_are_rounded():
    rng = np.random.default_rng(0)
    drawn = [settings._draw("learning_rate", "log:0.001:10", rng) for _ in range(200)]
    assert all(float(f"{value:.3g}") == value for value in drawn)
    assert len(set(drawn)) > 180
    narrow = [settings._draw("learning_rate", "uniform:1:1.001", rng) for _ in range(200)]
    assert all(1 <= value <= 1.001 for value in narrow)
    assert len(set(narrow)) > 30


@pytest.mark.slow
def test_dry_run_prices_actual_draws_or_says_unknown(tmp_path, seed):
    """A dry run prices the draws of the actual seed; previously it used seed 0."""
    config = dataclasses.replace(TINY, epsilon=None, noise_multiplier=2.0)
    drawn = {"grid": (), "random": ("batch_size=int:1:1000",), "trials": 2}
    begun = sweep(tmp_path, **drawn)
    results = run_sweep({"one": config}, begun, progress=False)
    other = dataclasses.replace(begun, workdir=tmp_path / "other")
    seed["seed"] = 2
    assert run_sweep({"one": config}, other, progress=False).notes != results.notes
    seed["seed"] = 1
    assert dry_run({"one": config}, begun, progress=False) == results.notes
    unknown = "drawn when the sweep starts"
    for changes, said in (
        ({"random": ("batch_size=int:1:1000",)}, True),
        ({"random": (), "grid": ("batch_size=64,128",)}, True),
        ({"random": (), "grid": ("batch_size=64,128",), "trials": None}, False),
        ({"random": ("learning_rate=1,2",), "repetitions": "geometric"}, False),
    ):
        new = dataclasses.replace(begun, workdir=tmp_path / "new", **changes)
        assert (unknown in dry_run({"one": config}, new, progress=False)[-1]) == said
    with pytest.raises(ConfigError, match="of a sweep with other settings"):
        dry_run({"one": config}, dataclasses.replace(begun, trials=3), progress=False)


def test_dry_run_prints_only_the_price(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(CONFIG_FILE)
    workdir = tmp_path / "out"
    options = ["--grid", "learning_rate=1,2", "--trials", "2"]
    options += ["--workdir", str(workdir), "--dry-run"]
    assert main(["sweep", str(tmp_path / "tiny.py"), *options]) == 0
    told = capsys.readouterr()
    assert "including its selection" in told.out
    assert "the best of a geometric number of trials with mean 2" in told.out
    assert "2 on average, and at most 5 with a probability of 95 %" in told.out
    assert told.err.startswith("dpoptax: computing the cost of the sweep ...")
    assert not workdir.exists()


@pytest.mark.slow
def test_killed_sweep_leaves_no_workers_and_resumes(tmp_path):
    (tmp_path / "tiny.py").write_text(CONFIG_FILE)
    workdir = tmp_path / "out"
    grid = ["--grid", "learning_rate=0.5,1", "l2_clip_norm=0.1,1"]
    start = "from dpoptax.training.cli.main import main; main()"
    command = [sys.executable, "-c", start, "sweep", "tiny.py"]
    options = ["--workdir", str(workdir), "--processes", "2", *grid]
    options += ["--repetitions", "fixed"]
    process = subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(workdir.glob("trials/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in workdir.glob("trials/*.json")}
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    results = run_sweep(CONFIGS, sweep(workdir), progress=False)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(results.trials) == 4
