"""Tests of features instead of images: on disk, in plans, runs, comparisons and audits."""

import dataclasses
import os

import numpy as np
import pytest

from dpoptax.training import ConfigError, cache_folder, config_of, planning, train_and_evaluate
from dpoptax.training.data import load_digits, streaming
from experiments import config
from experiments.config import ExperimentConfig
from experiments.data import dictionary, features, scattering
from experiments.data.dictionary import Dictionary
from experiments.data.published_data import PublishedSpec
from experiments.data.scattering import Scattering
from experiments.methods import Augmented
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
    return {name: values[:40] for name, values in load_digits().train.items()}


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


@pytest.mark.parametrize("wanted", [WANTED, Dictionary(filters=4, patch=3, grid=2)])
def test_adding_example_does_not_change_other_features(wanted, monkeypatch):
    """Features of the other examples stay equal bit for bit, at any position."""
    for name, size in (("_IMAGES", 100), ("_PATCHES", 2000), ("_SHAPES", 20)):
        monkeypatch.setattr(dictionary, name, size)
    images = np.random.default_rng(0).normal(size=(300, 8, 7, 3)).astype(np.float32)
    images[[0, 9]] = [[[[np.nan]]], [[[1e6]]]]
    with_it = np.concatenate(list(features._parts(images, wanted)))
    without = np.concatenate(list(features._parts(images[1:], wanted)))
    np.testing.assert_array_equal(with_it[1:], without)


def trained(config, workdir):
    return train_and_evaluate(config_of(config), workdir, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_features_on_disk_train_like_features_in_memory(folder, held_out, tmp_path, monkeypatch):
    found = []
    for limit in (2**28, 0):
        monkeypatch.setattr(features, "IN_MEMORY", limit)
        config._loaded.cache_clear()
        run = dataclasses.replace(CONFIG, held_out=held_out)
        assert streaming.in_memory(run.data().train) == (held_out or bool(limit))
        found.append(trained(run, tmp_path / str(limit)))
    memory, disk = found
    assert disk["dataset_size"] == (1151 if held_out else 1438)
    for name in ("params_sha256", "test_accuracy"):
        assert memory[name] == disk[name]


@pytest.mark.slow
def test_plans_know_shapes_without_computing_features(folder, tmp_path, monkeypatch):
    write_mnist(tmp_path)
    mnist = dataclasses.replace(CONFIG, dataset="mnist", batch_size=4)
    monkeypatch.setattr(features, "_parts", refuse)
    published = planning.plan_run(mnist.task(), count_flops=False)
    assert published.num_params == 7 * 7 * 81 * 10 + 10
    assert "on mnist" in planning.text("mnist", published)
    given = PublishedSpec("mnist", tmp_path).load().train["inputs"]
    assert mnist.task().data["inputs"].shape[1:] == WANTED.shape(given.shape[1:])


def test_refuses_data_without_features(folder, split):
    with pytest.raises(ConfigError, match="`features` must be one of .*got 'scatering'"):
        ExperimentConfig(features="scatering")
    with pytest.raises(ConfigError, match="`feature_colors` must be .*Did you mean 'opponent'"):
        ExperimentConfig(feature_colors="oponent")
    with pytest.raises(ConfigError, match=r"`features` must be 'none' for method="):
        ExperimentConfig(features="scattering", method=Augmented())
    for wanted in (WANTED, Dictionary()):
        with pytest.raises(ConfigError, match=f"a source of records, got '{wanted.name}'"):
            features.featured([{"inputs": split["inputs"][0]}], wanted, name="mine")
    with pytest.raises(ConfigError, match="dataset='sst2', which is for sentences"):
        ExperimentConfig(dataset="sst2", features="scattering").data()
