"""Tests of trainer runs over devices and processes: equal to one device, and movable."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from flax import serialization

from dpoptax.training.data import dataset, streaming

CONFIG = """
import numpy as np
from dpoptax.training.data import dataset
from dpoptax.training.data import streaming
from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import Disk

READ = []

class Records:
    # A random-access source that writes down what this process reads.
    def __init__(self, arrays):
        self.arrays = arrays
    def __len__(self):
        return len(self.arrays["labels"])
    def __getitem__(self, index):
        with open({log!r} + f"-{{__import__('jax').process_index()}}", "a") as log:
            log.write(f"{{index}}\\n")
        return {{name: array[index] for name, array in self.arrays.items()}}

@dataset.register_dataset
def records():
    digits = dataset.digits()
    return dataset.Dataset("records", Records(digits.train), digits.test, 10)

def get_config():
    return TrainConfig(
        method=Disk(), dataset="records", model="cnn", steps=4, batch_size=60, microbatch_size=8,
        noise_multiplier=1.0, epsilon=None, accountant="rdp", eval_every=2, checkpoint_every=2,
        seed=0,
    )
"""


def _command(config, workdir, *options):
    program = "import sys; from dpoptax.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return [
        sys.executable,
        "-c",
        program,
        "train",
        str(config),
        "--workdir",
        str(workdir),
        *options,
    ]


def _environment(devices, **more):
    # Only the order of sums changes; compiler optimizations are not tested here.
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, **quick, "XLA_FLAGS": flags, **more}


def _together(commands, devices):
    """Runs commands as processes of one run, each with `devices` devices; returns their outputs."""
    if len(commands) == 1:
        environments = [_environment(devices)]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        environments = [
            _environment(
                devices,
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES=str(len(commands)),
                JAX_PROCESS_ID=str(rank),
            )
            for rank in range(len(commands))
        ]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command, env in zip(commands, environments, strict=True)
    ]
    outputs = []
    try:
        for process in running:
            output, _ = process.communicate(timeout=400)
            assert process.returncode == 0, output.decode()
            outputs.append(output.decode())
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return outputs


def _run(processes, devices, config, workdir, *options):
    """Trains with several processes and devices; returns the parameters and the summary."""
    _together([_command(config, workdir, *options)] * processes, devices)
    params = serialization.msgpack_restore((workdir / "params.msgpack").read_bytes())
    return params, json.loads((workdir / "summary.json").read_text())


def _flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _assert_close(got, want, atol=1e-6):
    want = dict(_flat(want))
    for name, value in _flat(got):
        np.testing.assert_allclose(value, want[name], rtol=0, atol=atol, err_msg=name)


def _reads(log, process):
    """Returns the records read by batches, without those that check and identify the data set."""
    with open(f"{log}-{process}") as lines:
        found = [int(line) for line in lines]
    for place in streaming.spread(dataset.digits().train_size):
        for _ in range(2):
            found.remove(place)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data", "must have the same config, seed, training"),
        ("seed", "different keys.*the same seed"),
        ("precision", "and package versions"),
    ],
)
def test_refuses_hosts_with_different_data_seed_or_precision(tmp_path, change, message):
    """Hosts that draw or read different records are refused: one record could be in two parts."""
    config = tmp_path / "config.py"
    rank = "__import__('jax').process_index()"
    text = CONFIG.format(log=str(tmp_path / "reads"))
    if change == "seed":
        text = text.replace("seed=0", "seed=int(__import__('os').environ['JAX_PROCESS_ID'])")
    elif change == "precision":
        precision = "('default', 'high')[int(__import__('os').environ['JAX_PROCESS_ID'])]"
        text += f"__import__('jax').config.update('jax_default_matmul_precision', {precision})"
    else:
        reversed_on_one = "{k: v[::1 - 2 * " + rank + "] for k, v in digits.train.items()}"
        text = text.replace("Records(digits.train)", f"Records({reversed_on_one})")
    config.write_text(text)
    with pytest.raises(AssertionError, match=message):
        _run(2, 1, config, tmp_path / "two", "--parallel", "hosts")


@pytest.mark.slow
def test_refuses_hosts_with_different_checkpoints(tmp_path):
    """Hosts at different steps are refused: each would add the noise of another step."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(log=str(tmp_path / "reads")).replace('"cnn"', '"mlp"'))
    _run(2, 1, config, tmp_path / "0", "--parallel", "hosts")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / "checkpoints" / "4")
    options = ("--parallel", "hosts", "--steps", "6")
    with pytest.raises(AssertionError, match="must see the same checkpoints"):
        _together([_command(config, tmp_path / name, *options) for name in "01"], 1)


OWN_LOOP = """
import jax, numpy as np, pytest
from jax.sharding import NamedSharding, PartitionSpec
import dpoptax

rank = int(__import__("os").environ["JAX_PROCESS_ID"])
jax.distributed.initialize(num_processes=2, process_id=rank)
whole = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec())
shared = jax.make_array_from_callback((3,), whole, lambda index: np.zeros(3, np.float32)[index])
clip = dpoptax.adaptive_clip(1.0)
mechanism = {"noise_multiplier": 1.0, "batch_size": 4}
own = jax.random.key(jax.process_index())
for params, key in ((shared, jax.random.key(7)), (np.zeros(3), own)):
    dpoptax.gaussian_noise(**mechanism, key=key).init(params)
for noise in (
    dpoptax.gaussian_noise(**mechanism, key=own),
    dpoptax.adaptive_gaussian_noise(clip, **mechanism, key=own),
    dpoptax.correlated_noise(dpoptax.matrix.BandedToeplitz((1.0,)), **mechanism, key=own),
    dpoptax.contrib.geodp(0.1, **mechanism, key=own),
):
    with pytest.raises(ValueError, match="must have the same key"):
        noise.init(shared)
with pytest.raises(RuntimeError, match="broadcast_one_to_all"):
    dpoptax.random_key_from_os()
print("refused")
"""


@pytest.mark.slow
def test_refuses_hosts_with_different_keys():
    """Hosts with separate keys are refused: each would release the sum with different noise."""
    outputs = _together([[sys.executable, "-c", OWN_LOOP]] * 2, 1)
    assert all("refused" in output for output in outputs)


FIT = """
import os, sys
import jax, numpy as np, optax
if "JAX_PROCESS_ID" in os.environ:
    rank = int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(num_processes=2, process_id=rank)
import dpoptax
from dpoptax.training import fit

data = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
plan = dpoptax.PrivacyPlan(
    dataset_size=60, batch_size=12, steps=4, noise_multiplier=2.0, seed=7, accountant="rdp"
)
result = fit(
    lambda params, x: ((params - x) ** 2).sum(), np.zeros(5), data, plan, key=jax.random.key(3),
    optimizer=optax.chain(dpoptax.disk(), optax.adam(0.1)), workdir=sys.argv[1], progress=False,
    mesh=jax.make_mesh((len(jax.devices()),), ("data",)),
)
print("params", *result.params)
"""


@pytest.mark.slow
def test_fit_shares_a_run_between_processes(tmp_path):
    found = []
    for processes in (1, 2):
        command = [sys.executable, "-c", FIT, str(tmp_path / str(processes))]
        for output in _together([command] * processes, 1):
            (line,) = [x for x in output.splitlines() if x.startswith("params ")]
            found.append([float(value) for value in line.split()[1:]])
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5)
    assert found[1] == found[2]


@pytest.mark.slow
def test_runs_are_shared_by_and_move_between_processes(tmp_path):
    config, log = tmp_path / "config.py", tmp_path / "reads"
    config.write_text(CONFIG.format(log=str(log)))
    alone, summary = _run(1, 1, config, tmp_path / "alone")
    read_alone = _reads(log, 0)
    (tmp_path / "reads-0").unlink()

    two, summary_of_two = _run(2, 2, config, tmp_path / "two", "--parallel", "hosts")
    _assert_close(two, alone)
    for field in ("epsilon", "steps", "noise_multiplier", "padded_size"):
        assert summary_of_two[field] == summary[field]
    # Each process reads its own part of the samples. Padding also reads record 0, at the end, in
    # the part of the last process.
    reads = [[i for i in _reads(log, process) if i] for process in (0, 1)]
    assert sorted(reads[0] + reads[1]) == sorted(i for i in read_alone if i)
    assert min(map(len, reads)) > 0

    four, _ = _run(1, 4, config, tmp_path / "four", "--parallel", "devices")
    _assert_close(four, alone)

    # Two processes run half of the steps; one runs the rest on other devices.
    for processes, devices, options in (
        (2, 1, ("--steps", "2", "--parallel", "hosts")),
        (1, 3, ()),
    ):
        parallel = () if options else ("--parallel", "devices")
        moved, summary_of_moved = _run(
            processes, devices, config, tmp_path / "moved", *options, *parallel
        )
    assert summary_of_moved["steps"] == 4
    _assert_close(moved, alone)


@pytest.mark.slow
def test_hosts_share_cipher_keys(tmp_path):
    """Checks noise by ChaCha20, batches by SHAKE-256, and a seed that one host draws."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(log=str(tmp_path / "reads")))
    ciphered = ("--generator", "chacha20", "--seed")
    alone, _ = _run(1, 1, config, tmp_path / "alone", *ciphered, str(2**200))
    two, summary = _run(
        2, 1, config, tmp_path / "two", *ciphered, str(2**200), "--parallel", "hosts"
    )
    _assert_close(two, alone)
    assert summary["generator"] == "SHAKE-256"
    drawn, summary = _run(
        2, 1, config, tmp_path / "drawn", *ciphered, "None", "--parallel", "hosts"
    )
    assert summary["assumed_secret"] == []
    with pytest.raises(AssertionError):
        _assert_close(drawn, alone)
