"""Tests of data larger than memory: reads and memory of a step."""

import time
import tracemalloc

import jax
import numpy as np
import pytest

from dpoptax.sampling import PoissonSampler, Sample
from dpoptax.training import ConfigError, TrainConfig, loop
from dpoptax.training.data import dataset as data
from dpoptax.training.data import streaming
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


@pytest.mark.slow
def test_streamed_run_equals_resident_run_bit_for_bit(files):
    config = TrainConfig(
        steps=3, seed=0, batch_size=32, model="linear", accountant="rdp", eval_every=3
    )
    resident = data.digits()
    streamed = data.Dataset("files", memory_mapped(files), resident.test, 10)
    plan = loop.make_plan(config, resident.train_size)
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
        batch, mask = streaming.load_batch(source, *sampler.sample(step))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["x"].shape == mask.shape == (sampler.padded_size,)
    assert peak < 500 * sampler.padded_size  # bytes; one mask of the data would be 10^8


def test_prefetch_keeps_order_and_passes_errors_on():
    loaded = []

    def load(step):
        loaded.append(step)
        if step == 6:
            raise OSError("gone")
        return step

    batches = streaming.prefetch(load, range(8))
    assert next(batches) == 0
    time.sleep(0.05)
    assert max(loaded) <= 2
    assert [next(batches) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_grain_source_needs_no_adapter():
    """`grain.sources.RandomAccessDataSource` requires only these two methods."""

    class Source:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return {"x": index}

    source = Source()
    sample = Sample(np.array([4, 7, 0]), np.array([True, True, False]))
    batch, mask = streaming.load_batch(source, *sample)
    assert batch["x"].tolist() == [4, 7, 0]
    assert mask.tolist() == [True, True, False]
