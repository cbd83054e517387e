"""Tests of sweeps: trials, the price of the result, and resuming after a kill."""

import dataclasses
import functools
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time

import dp_accounting as dpa
import jax
import numpy as np
import optax
import pytest

from dpoptax import PrivacyPlan
from dpoptax.accounting import selection
from dpoptax.matrix import BandedToeplitz, CyclicPoissonSampler
from dpoptax.runs import OtherRunError, to_decimals, words_of
from dpoptax.training import (
    Comparison,
    ConfigError,
    Evaluation,
    Task,
    classification,
    compare,
    config_of,
    load_params,
)
from dpoptax.training.classifier import MLP
from dpoptax.training.cli.main import main
from dpoptax.training.data import load_digits
from dpoptax.training.run import checkpoints
from dpoptax.training.search import settings, trials
from dpoptax.training.search import sweep as sweep_module
from dpoptax.training.search.price import Price, Sweep
from dpoptax.training.search.sweep import dry_run, prepare, run_sweep, table
from dpoptax.training.search.trials import Trial, record_path
from experiments.config import ExperimentConfig
from experiments.methods import GeoDP, NonPrivate
from tests.helpers import event_epsilon

TINY = config_of(
    ExperimentConfig(model="linear", steps=3, batch_size=64, eval_every=1, accountant="rdp", seed=0)
)
CONFIGS = {"tiny": TINY}
CONFIG_FILE = """
{first}
import optax
from dpoptax import PrivacyPlan
from dpoptax.training import Task, classification
from dpoptax.training.classifier import MLP
from dpoptax.training.data import load_digits

def tiny(
    learning_rate: float = 1.0, l2_clip_norm: float = 1.0, seed: int = 0, held_out: bool = False
) -> Task:
    data, optimizer = load_digits(held_out=held_out), optax.sgd(learning_rate)
    size = {{"dataset_size": data.train_size, "batch_size": 64, "steps": 3}}
    plan = PrivacyPlan(**size, epsilon=3, delta=1e-5, accountant="rdp")
    return classification(
        MLP(10, ()), data, plan, seed=seed, optimizer=optimizer, clip=l2_clip_norm, name="mine"
    )
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
    records = [records_of(workdir, row) for row in results.trials]
    seeds = {record["config"]["seed"] for record in records}
    assert len(seeds) == 4
    assert min(seeds) > 2**32  # the published parameters do not reveal the number of the trial
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
    dataset = load_digits()
    dense = load_params(workdir / "best" / "params.msgpack")["Dense_0"]
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
    assert f"({to_decimals(summary['epsilon'])[:3]}" in text
    model = (workdir / "best" / "params.msgpack").read_bytes()
    assert f"params.msgpack, SHA-256 of the file: {hashlib.sha256(model).hexdigest()}" in text
    assert "the best of a fixed number of trials, which the numbers include" in text


def test_command_shows_no_secret_of_a_random_number_of_trials(tmp_path, capsys, seed):
    seed["seed"] = 3
    (tmp_path / "tiny.py").write_text(CONFIG_FILE.format(first=""))
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


def test_prices_all_trials_together_and_adds_noise_to_scores(finished):
    workdir, results = finished
    price = results.price
    record = records_of(workdir, results.trials[0])
    plan = TINY.task(held_out=True).plan
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
    monkeypatch.setattr(trials, "run_task", None)
    for seed in (0, None):  # the config's seed, which no trial uses
        again = run_sweep({"tiny": TINY.replace(seed=seed)}, sweep(workdir), progress=False)
        assert again.result == results.result
    with pytest.raises(OtherRunError, match="^`grid` must be .* as in the sweep"):
        run_sweep(CONFIGS, sweep(workdir, grid=("learning_rate=1,2",)), progress=False)


def test_noise_of_a_score_belongs_to_its_accuracy():
    cost = Price(score_stddev=3.0, held_out_size=100)
    errors = [
        100 * (sweep_module._scores([{"test_accuracy": x}], cost, 7)[0] - x)
        for x in (0.25, 0.25, 0.26)
    ]
    assert errors[0] == errors[1]
    assert abs(errors[0] - errors[2]) > 1e-3


EDITED = {
    "loss": 1.0,
    "filter": 1.0,
    "params": 1.0,
    "noise": None,
    "metric": 1.0,
    "band": 0.5,
    "train": lambda rows: rows,
    "test": lambda rows: rows,
}


def edited(
    learning_rate: float = 1.0, band: float = 0.0, seed: int | None = 0, held_out: bool = False
) -> Task:
    """Returns a user's task, whose function is edited between two commands."""
    data = load_digits()
    changed = {name: EDITED[name](getattr(data, name)) for name in ("train", "test")}
    data = dataclasses.replace(data, **changed)
    data = data.for_selection() if held_out else data
    cycle = data.train_size // 64
    plan = PrivacyPlan(
        sampler=CyclicPoissonSampler(cycle * 64, 64, cycle_length=cycle),
        steps=3,
        delta=1e-5,
        accountant="rdp",
        strategy=BandedToeplitz((1.0, EDITED["band"] + band)),
        **({"epsilon": 3} if EDITED["noise"] is None else {"noise_multiplier": EDITED["noise"]}),
    )
    data = dataclasses.replace(data, train={k: x[: cycle * 64] for k, x in data.train.items()})
    task = classification(
        MLP(10, ()),
        data,
        plan,
        seed=seed,
        transform_loss=lambda loss: lambda *args: EDITED["loss"] * loss(*args),
        optimizer=optax.chain(optax.scale(EDITED["filter"]), optax.sgd(learning_rate)),
    )
    metrics = task.evaluate.metrics

    def scaled(*args):
        return {name: EDITED["metric"] * x for name, x in metrics(*args).items()}

    evaluate = Evaluation(scaled, data.test)
    params = jax.tree.map(lambda x: x * EDITED["params"], task.params)
    return dataclasses.replace(task, evaluate=evaluate, params=params)


def with_row(place):
    def change(rows):
        inputs = rows["inputs"].copy()
        inputs[place] *= 0.5
        return {**rows, "inputs": inputs}

    return change


EDITS = [
    ("loss", -1.0, "`loss_fn`, with everything that it closes over,"),
    ("filter", 0.5, "`optimizer`, with everything|`optimizer`"),
    ("params", 0.5, "`params`"),
    ("metric", 0.5, "`evaluate`, with its examples,"),
    ("band", 0.25, "`(noise_multiplier|strategy)`"),
    ("train", with_row(0), "The training examples"),
    ("train", with_row(4), "The training examples"),  # it is held out
]


@pytest.mark.parametrize(("part", "value", "named"), EDITS)
def test_refuses_to_resume_an_edited_sweep(part, value, named, tmp_path, monkeypatch):
    """Equal keys would add the same noise to two sums, and ε covers one sweep."""
    configs, one_trial = {"one": config_of(edited)}, sweep(tmp_path, grid=("learning_rate=1",))
    first = run_sweep(configs, one_trial, progress=False)
    assert run_sweep(configs, one_trial, progress=False) == first
    monkeypatch.setitem(EDITED, part, value)
    if part == "loss":
        shutil.rmtree(tmp_path / "trials")
    with pytest.raises(OtherRunError, match=f"^{named} must be .* as in the sweep"):
        run_sweep(configs, one_trial, progress=False)


def test_an_edited_sweep_with_the_same_seed_has_other_noise(tmp_path, monkeypatch):
    keys, real = [], trials.run_task
    monkeypatch.setattr(
        trials, "run_task", lambda *args, key, **kw: keys.append(key) or real(*args, key=key, **kw)
    )
    for part, value, _ in [("loss", 1.0, ""), *EDITS]:
        with monkeypatch.context() as patch:
            patch.setitem(EDITED, part, value)
            given = sweep(tmp_path / str(len(keys)), grid=("learning_rate=1",))
            run_sweep({"one": config_of(edited)}, given, progress=False)
    # A change of held-out examples changes the scores, whose noise differs, and no release.
    assert len({words_of(key) for key in keys}) == len(keys)


def test_refuses_trials_with_other_noise_than_priced(tmp_path, monkeypatch):
    """A sweep does not go on if another version of the accounting calibrates other noise."""
    configs, one_trial = {"one": config_of(edited)}, sweep(tmp_path, grid=("learning_rate=1",))
    monkeypatch.setitem(EDITED, "noise", 1.0)
    run_sweep(configs, one_trial, progress=False)
    monkeypatch.setitem(EDITED, "noise", 1.1)
    with pytest.raises(OtherRunError, match="`noise_multiplier` must be 1.0, as in the sweep"):
        run_sweep(configs, one_trial, progress=False)


@pytest.mark.parametrize("values", ["0.0,0.25", "uniform:0.01:0.25"])
def test_refuses_drawn_setting_that_affects_noise(tmp_path, monkeypatch, values):
    monkeypatch.setitem(EDITED, "noise", 1.0)
    configs = {"one": config_of(edited)}
    given = {"grid": (), "repetitions": "geometric", "trials": 8}
    with pytest.raises(ConfigError, match="must not change the privacy cost of a trial"):
        prepare(configs, sweep(tmp_path, random=(f"band={values}",), **given), 3)
    prepare(configs, sweep(tmp_path, random=("band=0.0",), **given), 3)


def test_comparison_trains_an_edited_filter_again(tmp_path, monkeypatch):
    configs, given = {"one": config_of(edited)}, Comparison(tmp_path, seeds=1, factors=(1.0,))
    first = compare(configs, given, progress=False)
    assert compare(configs, given, progress=False) == first
    monkeypatch.setitem(EDITED, "filter", -1.0)
    again = compare(configs, given, progress=False)
    assert again.methods[0].runs[0]["params_sha256"] != first.methods[0].runs[0]["params_sha256"]


@pytest.mark.parametrize("part", ["train", "test", "metric"])
def test_comparison_trains_again_on_other_examples(tmp_path, monkeypatch, part):
    configs, given = {"one": config_of(edited)}, Comparison(tmp_path, seeds=1, factors=(1.0,))
    for runs in (1, 2):
        compare(configs, given, progress=False)
        assert len(list((tmp_path / "runs").glob("*.json"))) == runs
        monkeypatch.setitem(EDITED, part, 0.5 if part == "metric" else with_row(3))


def ignoring(
    learning_rate: float = 1.0, seed: int | None = 0, held_out: bool = False, scored: bool = True
) -> Task:
    """Returns a task that tests on the same examples whether or not they are held out."""
    task = edited(learning_rate, seed=seed)
    return task if scored else dataclasses.replace(task, evaluate=lambda params: {})


def test_choices_need_an_accuracy_on_held_out_examples(tmp_path):
    config = {"one": config_of(ignoring)}
    without = {"one": config["one"].replace(scored=False)}
    given = sweep(tmp_path, grid=("learning_rate=1",))
    for choose in (
        lambda configs: run_sweep(configs, given, progress=False),
        lambda configs: dry_run(configs, given, progress=False),
        lambda configs: compare(configs, Comparison(tmp_path, seeds=1), progress=False),
    ):
        with pytest.raises(ConfigError, match="`held_out=True` of ignoring must evaluate"):
            choose(config)
        with pytest.raises(ConfigError, match="an `Evaluation` with the metric 'accuracy'"):
            choose(without)


def test_in_order_trials_use_whole_groups(tmp_path):
    given = {"grid": ("sampling=in_order",)}
    results = run_sweep(CONFIGS, sweep(tmp_path, **given), progress=False)
    assert records_of(tmp_path, results.trials[0])["dataset_size"] == 1151 // 64 * 64


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


def test_only_owner_can_read_seeds_and_number_of_trials(tmp_path, seed):
    """A seed reproduces the noise of its trial."""
    seed["seed"] = 3
    given = {"trials": 2, "repetitions": "poisson"}
    results = run_sweep(CONFIGS, sweep(tmp_path, **given), progress=False)
    seed["seed"] = 1
    assert results.trials
    for name in ("trials.md", "sweep.json", "trials"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert not list(tmp_path.glob("*.partial"))


def test_interrupted_sweep_resumes(finished, tmp_path, monkeypatch):
    _, expected = finished
    started = []
    real = trials.run_task

    def interrupted(*args, **options):
        started.append(args)
        if len(started) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(trials, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(CONFIGS, sweep(tmp_path / "out"), progress=False)
    results = run_sweep(CONFIGS, sweep(tmp_path / "out"), progress=False)
    assert len(started) == 3 + 2
    assert results.trials == expected.trials
    assert results.result == expected.result


@pytest.mark.slow
def test_random_number_of_trials_costs_less(tmp_path):
    fixed = prepare(CONFIGS, sweep(tmp_path, trials=30), 0).price
    for distribution in selection.SHAPES:
        random = prepare(CONFIGS, sweep(tmp_path, trials=30, repetitions=distribution), 5)
        assert len(random.chosen) == selection.draw_number(
            30, distribution, sweep_module._seed(5, "number")
        )
        assert random.price.epsilon < fixed.epsilon


def test_random_trials_cost_as_much_as_costliest_setting(tmp_path):
    """The price covers the costliest config even if it was not drawn."""
    small = TINY.replace(epsilon=None, noise_multiplier=2.0)
    configs = {"small": small, "large": small.replace(batch_size=512)}
    given = {"grid": (), "repetitions": "geometric", "trials": 2}
    drawn = sweep(tmp_path, random=("learning_rate=log:0.1:10",), **given)
    price = [
        prepare(chosen, drawn, 3).price.epsilon
        for chosen in (configs, {"large": configs["large"]}, {"small": small})
    ]
    assert price[0] == pytest.approx(price[1], rel=1e-9)
    assert price[1] > price[2]
    listed = sweep(tmp_path, **{**given, "grid": ("batch_size=64,512",)})
    assert prepare({"small": small}, listed, 3).price.epsilon == price[0]
    for values in ("int:32:64", "64,512"):
        with pytest.raises(ConfigError, match="must not change the privacy cost .* --grid"):
            prepare({"small": small}, sweep(tmp_path, random=(f"batch_size={values}",), **given), 3)


def test_sweep_without_guarantee_states_no_epsilon(tmp_path):
    for method, reason in ((NonPrivate(), "without privacy"), (GeoDP(), "not a mean")):
        noise = 1.0 if method.private else None
        config = TINY.replace(method=method, noise_multiplier=noise)
        *_, price, guarantee = prepare({"one": config}, sweep(tmp_path), 0)
        assert (price.epsilon, guarantee) == (None, None)
        assert reason in price.reason


def test_random_settings_stay_in_range():
    given = ("learning_rate=log:0.1:10", "steps=int:2:4", "optimizer=sgd,adam", "delta=1e-5")
    drawn = settings.random_candidates(CONFIGS, given, 200, np.random.default_rng(0))
    rates = [candidate.changes["learning_rate"] for candidate in drawn]
    assert all(float(f"{rate:.4g}") == rate for rate in rates)
    rates = np.log10(rates)
    assert rates.min() > -1
    assert rates.max() < 1
    assert abs(rates.mean()) < 0.15
    assert {candidate.changes["steps"] for candidate in drawn} == {2, 3, 4}
    assert {candidate.changes["optimizer"] for candidate in drawn} == {"sgd", "adam"}


def test_grid_accepts_hyphens():
    (found,) = settings.grid_candidates(CONFIGS, ("batch-size=64",))
    assert found.config.flags["batch_size"].default == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ("learning_rat=1",)}, "got 'learning_rat'. Did you mean 'learning_rate'"),
        ({"grid": ("seed=1,2",)}, "must not be the seed"),
        (
            {"grid": ("learning_rate",)},
            "must have the form NAME=VALUE,VALUE,..., got 'learning_rate'",
        ),
        ({"grid": ("=1",)}, "must have the form NAME=VALUE,VALUE,..., got '=1'"),
        ({"grid": ("steps=1", "steps=2")}, "must name each argument once"),
        ({"grid": ("dataset=digits,mnist",)}, "The data must be the same for all trials"),
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


def test_record_path_depends_on_config_split_and_code(tmp_path):
    path = functools.partial(record_path, tmp_path, made_by="a")
    trial = Trial(TINY.replace(seed=3))
    assert path(trial) == path(Trial(TINY.replace(seed=3)))
    different = [Trial(TINY.replace(seed=4)), Trial(TINY.replace(seed=3, held_out=True))]
    assert len({path(trial), *map(path, different), path(trial, made_by="b")}) == 4


def test_comparison_notes_different_models(tmp_path):
    given = Comparison(tmp_path, seeds=1, factors=(1.0,))
    notes = compare(CONFIGS | {"wide": TINY.replace(model="mlp")}, given, progress=False).notes
    assert "different models. Numbers of parameters: DP-SGD (tiny) 650, DP-SGD (wide)" in notes[-1]
    alone = compare(CONFIGS, given, progress=False).notes
    assert not any("different models" in note for note in alone)


@pytest.mark.slow
def test_dry_run_prices_actual_draws_or_says_unknown(tmp_path, seed):
    """A dry run prices the draws of the actual seed; previously it used seed 0."""
    config = TINY.replace(epsilon=None, noise_multiplier=2.0)
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
    with pytest.raises(OtherRunError, match="^`trials` must be .* as in the sweep"):
        dry_run({"one": config}, dataclasses.replace(begun, trials=3), progress=False)


def test_dry_run_prints_only_the_price(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(CONFIG_FILE.format(first=""))
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
def test_killed_sweep_resumes(tmp_path):
    (tmp_path / "tiny.py").write_text(CONFIG_FILE.format(first=""))
    workdir = tmp_path / "out"
    grid = ["--grid", "learning_rate=0.5,1", "l2_clip_norm=0.1,1"]
    start = "from dpoptax.training.cli.main import main; main()"
    command = [sys.executable, "-c", start, "sweep", "tiny.py"]
    options = ["--workdir", str(workdir), "--repetitions", "fixed", *grid]
    process = subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(workdir.glob("trials/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in workdir.glob("trials/*.json")}
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list(workdir.glob("trials/*.json"))) == 4
