"""Tests of data larger than memory: reads and memory of a step."""

import tracemalloc

import jax
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._support import digests
from dpoptax.runs import draws_of, rows_digest
from dpoptax.sampling import PoissonSampler
from dpoptax.training import ConfigError, fit
from dpoptax.training.data import dataset as data
from dpoptax.training.data import streaming
from dpoptax.users import UserTable
from tests.runs import memory_mapped


@pytest.fixture
def files(tmp_path):
    """The digits as memory-mapped files."""
    for name, array in data.load_digits().train.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


def test_reads_sampled_records_from_arrays_files_and_sources(files):
    arrays = data.load_digits().train
    mapped = memory_mapped(files)
    source = [{name: array[i] for name, array in arrays.items()} for i in range(20)]
    indices = np.array([3, 3, 0, 19])
    want = {name: array[indices] for name, array in arrays.items()}
    for found in (arrays, mapped, source):
        jax.tree.map(np.testing.assert_array_equal, streaming.read(found, indices), want)
    assert [streaming.source_size(s) for s in (arrays, mapped, source)] == [1438, 1438, 20]
    assert [streaming.in_memory(s) for s in (arrays, mapped, source)] == [True, False, False]
    assert not isinstance(streaming.read(mapped, indices)["inputs"], np.memmap)


def _sources(files):
    """Arrays, files and records, each as a function of the order of 1438 records."""
    arrays = data.load_digits().train

    def mapped(order):
        for name, array in arrays.items():
            np.save(files / f"{name}.npy", array[order])
        return memory_mapped(files)

    return (
        lambda order: {name: array[order] for name, array in arrays.items()},
        mapped,
        lambda order: [{name: array[i] for name, array in arrays.items()} for i in order],
    )


def test_digest_reads_all_records_in_order(files, monkeypatch):
    """Two neighboring records that change places would be in the parts of two hosts."""
    monkeypatch.setattr(digests, "_PART", 2**12)
    order = list(range(1438))
    for make in _sources(files):
        digest = rows_digest(make(order))
        assert rows_digest(make(order)) == digest
        for place in (0, 700, 1436):
            swapped = [*order[:place], order[place + 1], order[place], *order[place + 2 :]]
            assert rows_digest(make(swapped)) != digest
        assert rows_digest(make(order[:-1])) != digest
    changed = dict(data.load_digits().train)
    changed["labels"] = changed["labels"].astype(np.int64)
    assert rows_digest(changed) != rows_digest(data.load_digits().train)


class _Source:
    """A random-access source, which is neither an array nor a list."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, place):
        return {"x": np.float32(self.records[place])}


def test_digest_of_source_is_that_of_a_sample_in_a_folder():
    order = np.arange(1438.0)
    swapped = order.copy()
    swapped[[700, 701]] = swapped[[701, 700]]
    first, second = _Source(order), _Source(swapped)
    assert rows_digest(first, whole=False) == rows_digest(second, whole=False)
    assert rows_digest(first) != rows_digest(second)


@pytest.mark.parametrize("labels", [np.int64, str, object])
def test_identity_of_draws_covers_owners(labels):
    owners = np.repeat(np.arange(100), 3).astype(labels)
    table = UserTable(owners, 2, seed=0)
    sampler = table.sampler(PoissonSampler, batch_size=9, seed=1)
    same = draws_of(sampler, UserTable(owners.copy(), 2, seed=0))
    assert draws_of(sampler, table) == same
    changed = owners.copy()
    changed[[200, 250]] = changed[[250, 200]]
    for other in (UserTable(changed, 2, seed=0), UserTable(owners, 2, seed=1), None):
        assert draws_of(sampler, other) != same


def _loss(params, example):
    logits = example["inputs"].reshape(-1) @ params
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["labels"])


@pytest.mark.slow
def test_streamed_run_equals_resident_run_bit_for_bit(files):
    resident = data.load_digits()
    streamed = data.Dataset("files", memory_mapped(files), resident.test, 10)
    plan = dpoptax.PrivacyPlan(
        dataset_size=1438, batch_size=32, steps=3, noise_multiplier=1.0, accountant="rdp"
    )

    def train(examples):
        options = {"key": jax.random.key(0), "progress": False}
        return fit(_loss, np.zeros((64, 10)), examples, plan, **options)

    first, second = (train(each.train).params for each in (resident, streamed))
    np.testing.assert_array_equal(first, second)
    with pytest.raises(ConfigError, match="streamed"):
        streamed.for_selection()


def test_step_on_huge_data_holds_only_its_batch(tmp_path):
    records = 10**8
    # A sparse file: 800 MB of zeros that take no disk space.
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (records,))
    del mapped
    source = memory_mapped(tmp_path)
    sampler = PoissonSampler(records, 1000, seed=0)
    sampler.sample(0)  # computes the padded size once
    tracemalloc.start()
    for step in range(5):
        indices, mask = sampler.sample(step)
        batch = streaming.read(source, indices)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["x"].shape == mask.shape == (sampler.padded_size,)
    assert peak < 500 * sampler.padded_size  # bytes; one mask of the data would be 10^8
