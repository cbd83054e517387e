"""Tests of data sets in their published file formats, and of errors for other files."""

import pickle

import numpy as np
import pytest

from dpoptax.training import ConfigError
from experiments.data import PUBLISHED
from experiments.data.published_data import PublishedSpec
from tests.published_data import write_cifar, write_mnist

TRAIN_CONFIG = """
from dpoptax.training import Task
from experiments.config import ExperimentConfig

RUN = ExperimentConfig(
    dataset="mnist", model="linear", steps=1, batch_size=4, epsilon=None, noise_multiplier=1.0,
    accountant="rdp",
)

def run(settings: ExperimentConfig = RUN) -> Task:
    return settings.task()
"""


FIRST_FILE = {
    "mnist": "train-images-idx3-ubyte",
    "fashion_mnist": "train-images-idx3-ubyte",
    "cifar10": "cifar-10-python.tar.gz",
    "cifar100": "cifar-100-python.tar.gz",
}
"""The file that an error names if the directory is empty; for GLUE it is train.tsv."""


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "."), ("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")],
)
def test_reads_idx_files(tmp_path, zipped, name, folder):
    splits = write_mnist(tmp_path / folder, zipped=zipped)
    dataset = PublishedSpec(name, tmp_path).load()
    assert (dataset.name, dataset.num_classes, dataset.train_size) == (name, 10, 20)
    for split, (images, labels) in zip((dataset.train, dataset.test), splits.values(), strict=True):
        assert split["inputs"].dtype == np.float32
        np.testing.assert_allclose(split["inputs"], images[..., None] / 255, rtol=1e-6)
        np.testing.assert_array_equal(split["labels"], labels)


def test_data_sets_with_same_file_names_share_a_directory(tmp_path):
    write_mnist(tmp_path / "mnist", train=3)
    write_mnist(tmp_path / "fashion_mnist", train=4)
    assert PublishedSpec("mnist", tmp_path).load().train_size == 3
    assert PublishedSpec("fashion_mnist", tmp_path).load().train_size == 4


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("num_classes", [10, 100])
def test_reads_cifar(tmp_path, num_classes, archive):
    splits = write_cifar(tmp_path, num_classes, archive=archive)
    dataset = PublishedSpec(f"cifar{num_classes}", tmp_path).load()
    assert dataset.num_classes == num_classes
    for split, (images, labels) in zip((dataset.train, dataset.test), splits.values(), strict=True):
        np.testing.assert_allclose(split["inputs"], (images / 255 - 0.5) / 0.25, atol=1e-6)
        np.testing.assert_array_equal(split["labels"], labels)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_missing_files_are_reported_with_remedy(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"`data_dir` must be given.*{name}.*--data-dir"):
        PublishedSpec(name).load()
    with pytest.raises(
        ConfigError, match=r"`data_dir` must be an existing directory, got '.*nowhere'"
    ):
        PublishedSpec(name, tmp_path / "nowhere").load()
    file = FIRST_FILE.get(name, "train.tsv")
    with pytest.raises(ConfigError, match=rf"{name}.* needs {file}.*--data-dir"):
        PublishedSpec(name, tmp_path).load()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"states shape \(20,\), but it holds 19 values"),
        (lambda content: content + b"\0", r"holds 21 values"),
        (lambda content: content[:5], r"not an IDX file of bytes with 1 dimension"),
        (lambda content: b"<html>" + content, r"not an IDX file"),
        (lambda content: content[:-1] + b"\x0a", r"labels from 0 to 9, got 0 to 10"),
        (lambda content: content[:7] + b"\x13" + content[8:-1], r"19 labels for 20 images"),
    ],
)
def test_damaged_idx_file_is_reported(tmp_path, damage, message):
    write_mnist(tmp_path, zipped=False)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"(?s)train-labels.*{message}"):
        PublishedSpec("mnist", tmp_path).load()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"])
def test_truncated_gzip_file_is_reported(tmp_path, name):
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(ConfigError, match=rf"{name} cannot be read.*not a complete gzip file"):
        PublishedSpec("mnist", tmp_path).load()


def test_damaged_archive_is_reported(tmp_path):
    write_cifar(tmp_path, 10)
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(
        ConfigError, match=r"cifar-10-python.tar.gz cannot be read.*complete archive"
    ):
        PublishedSpec("cifar10", tmp_path).load()


def test_missing_or_truncated_batch_is_reported(tmp_path):
    write_cifar(tmp_path, 10, archive=False)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data_batch_3 cannot be read.*not a pickled batch"):
        PublishedSpec("cifar10", tmp_path).load()
    path.unlink()
    with pytest.raises(ConfigError, match=r"cifar-10-batches-py cannot.*lacks .*data_batch_3"):
        PublishedSpec("cifar10", tmp_path).load()


def test_refuses_pickle_that_would_run_code(tmp_path):
    class Payload:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    write_cifar(tmp_path, 100, archive=False)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(ConfigError, match=r"train cannot be read.*arrays only, got .*exec"):
        PublishedSpec("cifar100", tmp_path).load()
