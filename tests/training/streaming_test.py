"""Tests of data larger than memory: reads and memory of a step."""

import tracemalloc

import jax
import numpy as np
import pytest

from dpoptax.sampling import PoissonSampler
from dpoptax.training import ConfigError, TrainConfig, hosts, loop
from dpoptax.training.data import dataset as data
from dpoptax.training.data import streaming
from dpoptax.training.run import resume
from dpoptax.users import UserTable
from tests.runs import memory_mapped


@pytest.fixture
def files(tmp_path):
    """The digits as memory-mapped files."""
    for name, array in data.digits().train.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


def test_reads_sampled_records_from_arrays_files_and_sources(files):
    arrays = data.digits().train
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
    arrays = data.digits().train

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
    monkeypatch.setattr(streaming, "_HASHED_BYTES", 2**12)
    order = list(range(1438))
    for make in _sources(files):
        digest = streaming.digest(make(order))
        assert streaming.digest(make(order)) == digest
        for place in (0, 700, 1436):
            swapped = [*order[:place], order[place + 1], order[place], *order[place + 2 :]]
            assert streaming.digest(make(swapped)) != digest
        assert streaming.digest(make(order[:-1])) != digest
    changed = dict(data.digits().train)
    changed["labels"] = changed["labels"].astype(np.int64)
    assert streaming.digest(changed) != streaming.digest(data.digits().train)


class _TwoHosts:
    """Two hosts that take turns: the second compares its digest with that of the first."""

    def __init__(self, monkeypatch):
        self.texts = []
        monkeypatch.setattr(resume.jax, "process_count", lambda: 2)
        monkeypatch.setattr(hosts, "same_on_all_hosts", self.same)

    def same(self, text):
        self.texts.append(text)
        return self.texts[0] == text


def test_refuses_hosts_whose_order_differs_outside_of_a_sample(files, monkeypatch):
    """Two neighboring records that change places would be in the parts of two hosts."""
    order = list(range(1438))
    swapped = [*order[:700], 701, 700, *order[702:]]
    for make in _sources(files):
        pair = _TwoHosts(monkeypatch)
        for each in (order, order):
            resume.check_same_on_hosts({"data": "equal"}, make(each), None)
        with pytest.raises(ConfigError, match="list files in one order"):
            resume.check_same_on_hosts({"data": "equal"}, make(swapped), None)
        assert len(pair.texts) == 3


def test_check_same_refuses_another_order(monkeypatch):
    _TwoHosts(monkeypatch)
    rows = np.arange(10.0)
    hosts.check_same({"x": rows})
    hosts.check_same({"x": rows.copy()})
    with pytest.raises(ValueError, match="`data` must hold the same examples in the same order"):
        hosts.check_same({"x": rows[::-1]})


@pytest.mark.parametrize("labels", [np.int64, str, object])
def test_refuses_hosts_whose_owners_differ(labels, monkeypatch):
    owners = np.repeat(np.arange(100), 3).astype(labels)
    _TwoHosts(monkeypatch)
    rows = np.zeros((300, 2))
    resume.check_same_on_hosts({}, rows, UserTable(owners, 2, seed=0))
    resume.check_same_on_hosts({}, rows, UserTable(owners.copy(), 2, seed=0))
    changed = owners.copy()
    changed[[200, 250]] = changed[[250, 200]]
    for table in (UserTable(changed, 2, seed=0), UserTable(owners, 2, seed=1), None):
        with pytest.raises(ConfigError, match="All hosts must have the same"):
            resume.check_same_on_hosts({}, rows, table)


@pytest.mark.slow
def test_streamed_run_equals_resident_run_bit_for_bit(files):
    config = TrainConfig(
        steps=3, seed=0, batch_size=32, model="linear", accountant="rdp", eval_every=3
    )
    resident = data.digits()
    streamed = data.Dataset("files", memory_mapped(files), resident.test, 10)
    plan = loop.plan_on_data(config, resident)
    first, second = (loop.train(config, dataset, plan) for dataset in (resident, streamed))
    assert first.summary["params_sha256"] == second.summary["params_sha256"]
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


def test_grain_source_needs_no_adapter():
    """`grain.sources.RandomAccessDataSource` requires only these two methods."""

    class Source:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return {"x": index}

    source = Source()
    batch = streaming.read(source, np.array([4, 7, 0]))
    assert batch["x"].tolist() == [4, 7, 0]
