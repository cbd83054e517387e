"""Tests of features instead of images: on disk, in plans, runs, comparisons and audits."""

import dataclasses
import json
import os

import numpy as np
import pytest

from dpoptax.training import ConfigError, audit, cache_folder, loop
from dpoptax.training.cli.main import main
from dpoptax.training.data import dataset as data
from dpoptax.training.data import streaming
from dpoptax.training.run import planning
from dpoptax.training.search import trials
from experiments.config import ExperimentConfig
from experiments.data import dictionary, features, scattering
from experiments.data.dictionary import Dictionary
from experiments.data.published_data import load_published
from experiments.data.scattering import Scattering
from experiments.methods import Augmented
from tests.games import skip_games
from tests.published_data import write_mnist

WANTED = Scattering()
CONFIG = ExperimentConfig(
    features="scattering",
    model="linear",
    steps=2,
    eval_every=2,
    batch_size=32,
    noise_multiplier=1.0,
    epsilon=None,
    accountant="rdp",
    seed=0,
)


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for features."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "dpoptax" / "features"


@pytest.fixture
def split():
    return {name: values[:40] for name, values in data.digits().train.items()}


def refuse(*_):
    raise AssertionError("features are computed a second time")


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (WANTED, (2, 2, 81)),
        pytest.param(Dictionary(5, 3, 3), (3, 3, 10), marks=pytest.mark.slow),
    ],
)
def test_features_are_stored_privately_and_reused(folder, split, wanted, shape, monkeypatch):
    first = features.featured(split, wanted, name="digits")
    assert first["inputs"].shape == (40, *shape)
    assert first["inputs"].dtype == np.float16
    np.testing.assert_array_equal(first["labels"], split["labels"])
    (file,) = folder.glob("*.npy")
    stored = np.load(file)
    assert stored.dtype == np.float16
    np.testing.assert_array_equal(stored, first["inputs"])
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700
        assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(features, "_parts", refuse)
    again = features.featured(split, wanted, name="other")
    np.testing.assert_array_equal(again["inputs"], first["inputs"])


@pytest.mark.parametrize("what", ["data", "parameters", "code"])
def test_stored_features_depend_on_data_parameters_and_code(
    folder, split, what, monkeypatch, tmp_path
):
    features.featured(split, WANTED, name="digits")
    wanted = WANTED
    if what == "data":
        images = split["inputs"].copy()
        images[-1, 0, 0, 0] += 1e-3
        split = {**split, "inputs": images}
    elif what == "parameters":
        wanted = dataclasses.replace(WANTED, groups=9)
    else:
        (tmp_path / "other.py").write_text("changed = True")
        monkeypatch.setattr(scattering, "__file__", str(tmp_path / "other.py"))
    features.featured(split, wanted, name="digits")
    assert len(list(folder.glob("*.npy"))) == 2


@pytest.mark.parametrize("damage", [b"", b"no array", None])
def test_recomputes_damaged_file(folder, split, damage):
    first = features.featured(split, WANTED, name="digits")
    (file,) = folder.glob("*.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100] if damage is None else damage)
    again = features.featured(split, WANTED, name="digits")
    np.testing.assert_array_equal(again["inputs"], first["inputs"])
    assert file.read_bytes() == whole


def test_warns_and_keeps_features_in_memory_without_folder(folder, split, monkeypatch):
    first = features.featured(split, WANTED, name="digits")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("")
    with pytest.warns(UserWarning, match="not kept for the next start.*XDG_CACHE_HOME"):
        again = features.featured(split, WANTED, name="digits")
    np.testing.assert_array_equal(again["inputs"], first["inputs"])


def test_refuses_cache_folder_writable_by_others(tmp_path):
    inside = tmp_path / "features"
    inside.mkdir()
    inside.chmod(0o777)
    with pytest.raises(PermissionError, match="must not be writable by other users"):
        cache_folder.prepare(inside)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="must not be writable by other users"):
        cache_folder.prepare(shared / "dpoptax" / "features")
    shared.chmod(0o1777)  # like /tmp: users can replace only their own files
    cache_folder.prepare(shared / "dpoptax" / "features")


def test_removes_oldest_files_above_the_limit(tmp_path):
    for index in range(3):
        file = tmp_path / f"{index}.npy"
        file.write_bytes(b"x" * 6)
        os.utime(file, (index, index))
    cache_folder.keep_newest(tmp_path, "*.npy", 10)
    assert [file.name for file in tmp_path.glob("*.npy")] == ["2.npy"]


def test_folder_is_inside_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.cache_folder("features") == tmp_path / "dpoptax" / "features"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder.cache_folder("features").is_absolute()


def test_interrupted_computation_leaves_no_file(folder, split, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(features, "_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        features.featured(split, WANTED, name="digits")
    assert list(folder.glob("*.npy")) == []


def test_removes_least_recently_used_features(folder, split, monkeypatch):
    features.featured(split, WANTED, name="digits")
    (old,) = folder.glob("*.npy")
    os.utime(old, (1, 1))
    monkeypatch.setattr(features, "LARGEST", 1.5 * old.stat().st_size)
    features.featured(split, dataclasses.replace(WANTED, groups=9), name="digits")
    assert not old.exists()
    assert len(list(folder.glob("*.npy"))) == 1


@pytest.mark.parametrize("wanted", [WANTED, Dictionary(filters=4, patch=3, grid=2)])
def test_adding_example_does_not_change_other_features(wanted, monkeypatch):
    """Features of the other examples stay equal bit for bit, at any position."""
    for name, size in (("_IMAGES", 100), ("_PATCHES", 2000), ("_SHAPES", 20)):
        monkeypatch.setattr(dictionary, name, size)
    images = np.random.default_rng(0).normal(size=(300, 8, 7, 3)).astype(np.float32)
    with_it = np.concatenate(list(features._parts(images, wanted)))
    without = np.concatenate(list(features._parts(images[1:], wanted)))
    np.testing.assert_array_equal(with_it[1:], without)


@pytest.mark.slow
def test_features_on_disk_train_like_features_in_memory(folder, monkeypatch):
    """Training is equal for features read by rows or kept in memory, held out or not."""
    found = {}
    for limit in (2**28, 0):
        monkeypatch.setattr(features, "IN_MEMORY", limit)
        dataset = load_published("digits", features=CONFIG.feature_map)
        assert streaming.in_memory(dataset.train) == bool(limit)
        for part in (dataset, dataset.for_selection()):
            plan = loop.plan_on_data(CONFIG, part)
            summary = loop.train(CONFIG, part, plan).summary
            result = summary["params_sha256"], summary["test_accuracy"]
            assert found.setdefault(part.train_size, result) == result
    assert sorted(found) == [1151, 1438]


@pytest.mark.slow
def test_plans_know_shapes_without_computing_features(folder, tmp_path, monkeypatch):
    write_mnist(tmp_path)
    mnist = dataclasses.replace(CONFIG, dataset="mnist", batch_size=4)
    with monkeypatch.context() as patched:
        patched.setattr(features, "_parts", refuse)
        published = planning.plan_run(mnist, count_flops=False)
        mnist = dataclasses.replace(mnist, data_dir=tmp_path)
        given = planning.plan_run(mnist, count_flops=False)
    assert published.num_params == given.num_params == 7 * 7 * 81 * 10 + 10
    assert "linear on mnist" in planning.text("mnist", given)
    dataset = load_published("mnist", tmp_path, features=mnist.feature_map)
    published = dataclasses.replace(mnist, data_dir=None).data().shapes("example")
    assert published.example == dataset.shapes("example").example


def test_refuses_data_without_features(folder, split):
    with pytest.raises(ConfigError, match="`features` must be one of .*got 'scatering'"):
        ExperimentConfig(features="scatering")
    with pytest.raises(ConfigError, match="`feature_colors` must be .*Did you mean 'opponent'"):
        ExperimentConfig(feature_colors="oponent")
    with pytest.raises(ConfigError, match=r"`features` must be 'none' for method="):
        ExperimentConfig(features="scattering", method=Augmented())
    counts = ("scattering_scale", "scattering_angles", "feature_groups")
    for name in (*counts, "dictionary_filters", "dictionary_patch", "dictionary_grid"):
        with pytest.raises(ConfigError, match=f"`{name}` must be a positive integer, got 0"):
            ExperimentConfig(**{name: 0})
    for wanted in (WANTED, Dictionary()):
        with pytest.raises(ConfigError, match=f"a source of records, got '{wanted.name}'"):
            features.featured([{"inputs": split["inputs"][0]}], wanted, name="mine")
    with pytest.raises(ConfigError, match="dataset='sst2', which is for sentences"):
        ExperimentConfig(dataset="sst2", features="scattering").data().shapes("example")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"features": "none"},
        {"scattering_angles": 6, "feature_groups": None},
        pytest.param({"feature_groups": 9}, marks=pytest.mark.slow),
        pytest.param({"scattering_scale": 1, "feature_groups": 9}, marks=pytest.mark.slow),
    ],
)
def test_refuses_to_resume_with_other_features(folder, tmp_path, change):
    loop.train_and_evaluate(CONFIG, tmp_path / "run", progress=False)
    name, value = next(iter(change.items()))
    other = dataclasses.replace(CONFIG, **change, steps=4)
    with pytest.raises(ValueError, match=rf"^`{name}` must be .* got {value!r}\."):
        loop.train_and_evaluate(other, tmp_path / "run", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_refuses_to_resume_with_features_of_other_images(folder, tmp_path, in_memory, monkeypatch):
    """A replaced image is refused: the same noise would be added to two different gradients."""
    if not in_memory:
        monkeypatch.setattr(features, "IN_MEMORY", 0)
    loop.train_and_evaluate(CONFIG, tmp_path / "run", progress=False)
    whole = data.digits()
    inputs = whole.train["inputs"].copy()
    inputs[701] = 0
    other = dataclasses.replace(whole, train={**whole.train, "inputs": inputs})
    monkeypatch.setitem(data.DATASETS, "digits", lambda: other)
    with pytest.raises(
        ValueError, match=r"^The training examples must be the same as in the first"
    ):
        loop.train_and_evaluate(CONFIG, tmp_path / "run", progress=False)


def test_does_not_read_features_writable_by_others(folder, split):
    first = features.featured(split, WANTED, name="digits")
    (file,) = folder.glob("*.npy")
    np.save(file, np.zeros_like(first["inputs"]))
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="not kept for the next start.*must not be writable"):
        again = features.featured(split, WANTED, name="digits")
    np.testing.assert_array_equal(again["inputs"], first["inputs"])


@pytest.mark.slow
def test_features_are_loaded_once_for_all_trials(folder, monkeypatch):
    first = trials.dataset_of(CONFIG, held_out=False)
    other = dataclasses.replace(CONFIG, learning_rate=0.1)
    assert trials.dataset_of(other, held_out=False, progress=True) is first
    plain = dataclasses.replace(CONFIG, features="none")
    assert trials.dataset_of(plain, held_out=False).train["inputs"].shape == (1438, 8, 8, 1)


TEXT = """
from experiments.config import ExperimentConfig
from dpoptax.training.methods import DPSGD, NonPrivate

def get_config():
    return ExperimentConfig(
        method={method}(), steps=2, eval_every=2, batch_size=64, accountant="rdp"
    )
"""


@pytest.mark.slow
def test_compare_sets_any_field_for_all_configs(folder, tmp_path):
    paths = []
    for name in ("DPSGD", "NonPrivate"):
        path = tmp_path / f"{name}.py"
        path.write_text(TEXT.format(method=name))
        paths.append(str(path))
    write_mnist(tmp_path, train=64)
    options = ["--data-dir", str(tmp_path), "--seeds", "1", "--factors", "1"]
    options += ["--set", "dataset=mnist", "model=linear", "batch_size=8", "delta=1e-6"]
    options += ["features=scattering", "feature_groups=9"]
    assert main(["compare", *paths, *options, "--workdir", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["dataset"], results["delta"]) == ("mnist", 1e-6)
    for method in results["methods"]:
        (run,) = method["runs"]
        stated = {name: run["config"][name] for name in ("features", "feature_groups", "model")}
        assert stated == {"features": "scattering", "feature_groups": 9, "model": "linear"}
        assert run["num_params"] == 7 * 7 * 81 * 10 + 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seed=1", "`set` must not contain seed, got 'seed=1'. Pass --seeds instead."),
        ("noise_multiplier=1", "Pass --epsilon"),
        ("features=wavelets", "`features` must be one of dictionary, none, scattering, got"),
        ("stepz=3", "got 'stepz'. Did you mean 'steps'?\n"),
        ("feature=scattering", "got 'feature'."),
        ("features", "must have the form FIELD=VALUE, got 'features'"),
        ("features=", "must have the form FIELD=VALUE, got 'features='"),
        ("method.kappa=1", "got 'method.kappa'."),
    ],
)
def test_unsettable_field_gives_one_clear_message(tmp_path, capsys, given, message):
    path = tmp_path / "dp_sgd.py"
    path.write_text(TEXT.format(method="DPSGD"))
    assert main(["compare", str(path), "--set", given, "--workdir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_audits_training_on_features(folder, monkeypatch, capsys):
    skip_games(monkeypatch)
    rows = audit.audit_config(dataclasses.replace(CONFIG, steps=1), progress=True)
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("dpoptax: auditing")] == [
        f"dpoptax: auditing DP-SGD, {name} ..."
        for name in (
            "one full-batch release",
            "one full-batch release, worst example found",
            "1 steps, white-box",
            "1 steps, last-iterate",
            "one training of linear",
        )
    ]
    assert rows[-1].name == "one training of linear"
    assert not any(row.result.violated for row in rows)
