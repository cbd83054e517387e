"""Tests of trainer runs over devices and processes: equal to one device, and movable.

Two processes with two devices each, and then one process with three devices, run all programs.
"""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import dpoptax
from dpoptax.runs import sampled_rows
from dpoptax.training import fit, hosts, load_params
from dpoptax.training.cli.main import main
from dpoptax.training.data import load_digits

pytestmark = pytest.mark.slow

CONFIG = """
import optax
import dpoptax
from dpoptax.training import MLP, Dataset, Task, classification
from dpoptax.training.data import load_digits

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

def run(steps: int = 4, linear: bool = False, seed: int | None = 0) -> Task:
    digits = load_digits()
    data = Dataset("records", Records(digits.train), digits.test, 10)
    sampler = dpoptax.sampling.PoissonSampler(1438, 60, multiple_of=8)
    plan = dpoptax.PrivacyPlan(
        sampler=sampler, steps=steps, noise_multiplier=1.0, accountant="rdp"
    )
    return classification(
        MLP(10, widths=() if linear else (64,)), data, plan, seed=seed, eval_every=2,
        checkpoint_every=2, microbatch_size=8, clip=1.0,
        optimizer=optax.chain(dpoptax.disk(), optax.sgd(1.0)),
    )
"""


def _write_configs(folder):
    """Writes configs of equal runs, which log reads to separate files, and of unequal runs."""
    for name in ("alone", "two", "other"):
        (folder / f"{name}.py").write_text(CONFIG.format(log=str(folder / f"reads-{name}")))
    text = (folder / "other.py").read_text()
    rank = "int(__import__('os').environ['JAX_PROCESS_ID'])"
    reversed_on_one = "{k: v[::1 - 2 * " + rank + "] for k, v in digits.train.items()}"
    precision = f"('default', 'high')[{rank}]"
    # Two neighboring records, which are not in the fingerprint, change places on one host.
    order = "list(range(700)) + [701, 700][::1 - 2 * " + rank + "] + list(range(702, 1438))"
    swapped_on_one = "{k: v[" + order + "] for k, v in digits.train.items()}"
    changed = {
        "swapped": text.replace("Records(digits.train)", f"Records({swapped_on_one})"),
        "data": text.replace("Records(digits.train)", f"Records({reversed_on_one})"),
        "seed": text.replace("int | None = 0", f"int | None = {rank}"),
        "precision": f"{text}\n__import__('jax').config.update({PRECISION!r}, {precision})",
    }
    for name, text in changed.items():
        (folder / f"{name}.py").write_text(text)


PRECISION = "jax_default_matmul_precision"
CIPHER = ("--linear", "--generator", "chacha20", "--seed")


def _train(folder, config, workdir, *options):
    """Runs `dpoptax train` and returns its exit code and messages."""
    command = ["train", str(folder / f"{config}.py"), "--workdir", str(folder / workdir), *options]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as told,
    ):
        return main(command), told.getvalue()


def _fitted(workdir, mesh):
    """Returns the parameters that `fit` finds, on a mesh or on one device."""
    data = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    plan = dpoptax.PrivacyPlan(
        dataset_size=60, batch_size=12, steps=4, noise_multiplier=2.0, accountant="rdp"
    )
    optimizer = optax.chain(dpoptax.disk(), optax.adam(0.1))
    options = {"optimizer": optimizer, "key": jax.random.key(3), "progress": False, "mesh": mesh}
    result = fit(
        lambda params, x: ((params - x) ** 2).sum(),
        np.zeros(5),
        data,
        plan,
        workdir=workdir,
        **options,
    )
    return np.asarray(result.params).tolist()


def _refused_keys():
    """Returns the errors of keys that differ between the hosts."""
    whole = NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec())
    shared = jax.make_array_from_callback((3,), whole, lambda index: np.zeros(3, np.float32)[index])
    clip = dpoptax.contrib.adaptive_clip(1.0)
    mechanism = {"noise_multiplier": 1.0, "batch_size": 4}
    own = jax.random.key(jax.process_index())
    for params, key in ((shared, jax.random.key(7)), (np.zeros(3), own)):
        dpoptax.gaussian_noise(**mechanism, key=key).init(params)
    errors = []
    for noise in (
        dpoptax.gaussian_noise(**mechanism, key=own),
        dpoptax.contrib.adaptive_gaussian_noise(clip, **mechanism, key=own),
        dpoptax.correlated_noise(dpoptax.matrix.BandedToeplitz((1.0,)), **mechanism, key=own),
        dpoptax.contrib.geodp(0.1, **mechanism, key=own),
    ):
        with pytest.raises(ValueError, match="key") as raised:
            noise.init(shared)
        errors.append(str(raised.value))
    with pytest.raises(RuntimeError, match="new_run"):
        dpoptax.random_key_from_os()
    return errors


class OwnSampler(dpoptax.sampling.PoissonSampler):
    """A user's sampler, with other draws and the same price."""


def _different_run(what, mode, mesh):
    """Returns what a run says in which the second host changes `what`."""
    other = jax.process_index() == 1
    changed = {name: name == what and other for name in CHANGES_ON_ONE_HOST}
    data = np.full((40, 8), 1 + changed["data"], np.float32)
    sign, clip = 1 - 2 * changed["loss"], 1.0 + changed["clip"]
    loss_fn = lambda params, x: sign * jnp.sum(params * x)  # noqa: E731
    plan = dpoptax.PrivacyPlan(
        dataset_size=40,
        batch_size=20 if changed["batch size"] else 40,
        steps=2,
        sampler=(dpoptax.sampling.PoissonSampler, OwnSampler)[changed["sampler"]],
        noise_multiplier=1.0 + changed["noise"],
        accountant="rdp",
    )
    key = jax.random.key(1 + changed["key"])
    options = {"key": key, "optimizer": optax.sgd(1.0), "progress": False, "mesh": mesh}
    try:
        if mode == "fit":
            found = fit(loss_fn, jnp.zeros(8), data, plan, clip=clip, **options).guarantee
        else:
            grad_fn = dpoptax.clipped_grad(loss_fn, clip, mesh=mesh)
            found = _by_hand(plan.new_run(key), grad_fn, data, mesh)
    except ValueError as error:
        return str(error)
    return found.stated_epsilon


CHANGES_ON_ONE_HOST = {
    "clip": "`clip`",
    "loss": "`loss_fn`",
    "noise": "The noise",
    "batch size": "The noise",
    "sampler": "The noise",
    "key": "The noise key",
    "data": "The training examples",
}


def _by_hand(run, grad_fn, data, mesh):
    """Trains as on the page on several hosts, and returns the guarantee."""
    tx = optax.chain(run.noise(), optax.sgd(1.0))
    params = hosts.replicate(jnp.zeros(8), mesh)
    state = hosts.replicate(tx.init(params), mesh)

    @jax.jit
    def step(params, state, batch, mask):
        grads = grad_fn(dpoptax.gradient_points(state, params), batch, mask)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in run.batches(data, sharding=NamedSharding(mesh, PartitionSpec("data"))):
        params, state = step(params, state, batch.examples, batch.mask)
    return run.guarantee(state)


def run_as_two_hosts(folder):
    """Runs in each of two processes: training, half of a run, and configs that are refused."""
    parallel = ("--parallel", "hosts")
    mesh = hosts.start("hosts")
    rank = jax.process_index()
    told = {"keys": _refused_keys(), "fit": _fitted(folder / "fit", mesh)}
    told["different"] = {
        f"{mode}: {what}": _different_run(what, mode, mesh)
        for mode in ("fit", "loop by hand")
        for what in ("nothing", *CHANGES_ON_ONE_HOST)
    }
    told["two"] = _train(folder, "two", "two", *parallel)
    told["moved"] = _train(folder, "other", "moved", "--steps", "2", *parallel)
    told["grown"] = _train(folder, "other", "grown", *parallel)
    told["ciphered"] = _train(folder, "other", "ciphered", *parallel, *CIPHER, str(2**200))
    told["drawn"] = _train(folder, "other", "drawn", *parallel, *CIPHER, "None")
    multihost_utils.sync_global_devices("trained")
    if rank == 1:
        shutil.copytree(folder / "moved", folder / "moved-1")
        shutil.rmtree(folder / "moved-1" / "checkpoints" / "2")
    multihost_utils.sync_global_devices("copied")
    told["checkpoints"] = _train(folder, "other", ("moved", "moved-1")[rank], *parallel)
    for name in ("data", "swapped", "seed", "precision"):
        told[name] = _train(folder, name, name, *parallel, "--linear")
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


def run_half_alone(folder):
    """Runs half of the steps in one process."""
    assert _train(folder, "other", "grown", "--steps", "2", "--parallel", "devices")[0] == 0


def run_alone(folder):
    """Runs in one process: training on one and on three devices, and the rest of the moved run."""
    told = {"fit": _fitted(folder / "fit-alone", None)}
    told["alone"] = _train(folder, "alone", "alone")
    told["three"] = _train(folder, "other", "three", "--parallel", "devices")
    told["moved"] = _train(folder, "other", "moved", "--parallel", "devices")
    told["ciphered"] = _train(folder, "other", "ciphered-alone", *CIPHER, str(2**200))
    (folder / "told-alone.json").write_text(json.dumps(told))


def _environment(devices, **more):
    # Only the order of sums changes; compiler optimizations are not tested here.
    quick = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, **quick, "XLA_FLAGS": flags, **more}


def start(command, processes, devices, **options):
    """Runs a command in processes of one run, each with `devices` devices; returns its outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    running = [
        subprocess.Popen(
            command,
            env=_environment(devices, **common, JAX_PROCESS_ID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )
        for rank in range(processes)
    ]
    outputs = []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=500)[0].decode())
            assert process.returncode == 0, outputs[-1]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return outputs


def _start(name, folder, processes, devices):
    """Runs a function of this module in processes of one run."""
    program = f"import pathlib, sys; from tests.training import hosts_test as test; test.{name}"
    command = [sys.executable, "-c", f"{program}(pathlib.Path(sys.argv[1]))", str(folder)]
    start(command, processes, devices)


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


def _reads(log, process, *, compared):
    """Returns the records read by batches, without those that check and identify the data set.

    If the data are `compared` between hosts, each reads all of them once.
    """
    with open(f"{log}-{process}") as lines:
        found = [int(line) for line in lines]
    for place in range(load_digits().train_size if compared else 0):
        found.remove(place)
    for place in sampled_rows(load_digits().train_size):
        for _ in range(2):
            found.remove(place)
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of all runs, and the exit codes and messages of each process."""
    folder = tmp_path_factory.mktemp("hosts")
    _write_configs(folder)
    _start("run_half_alone", folder, 1, 3)
    _start("run_as_two_hosts", folder, 2, 2)
    _start("run_alone", folder, 1, 3)
    return folder, *(json.loads((folder / f"told-{name}.json").read_text()) for name in NAMES)


NAMES = ("0", "1", "alone")


def _result(ran, name):
    """Returns the parameters and the summary of a run that must have succeeded in each process."""
    folder, *told = ran
    assert {each[name][0] for each in told if name in each} == {0}, told
    params = load_params(folder / name / "params.msgpack")
    return params, json.loads((folder / name / "summary.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data", "differ in The training examples"),
        ("swapped", "differ in The training examples in their order"),
        ("seed", "differ in The noise key"),
        ("precision", "differ in `jax_default_matmul_precision`"),
        # Each would add the noise of another step.
        ("checkpoints", "must see the same checkpoints"),
    ],
)
def test_refuses_hosts_with_different_data_seed_precision_or_checkpoints(ran, change, message):
    """Hosts that draw or read different records are refused: one record could be in two parts."""
    _, *pair, _ = ran
    for told in pair:
        code, text = told[change]
        assert code == 2
        assert re.search(message, text)


def test_refuses_hosts_with_different_keys(ran):
    """Hosts with separate keys are refused: each would release the sum with different noise."""
    _, *pair, _ = ran
    for told in pair:
        assert len(told["keys"]) == 4
        assert all("they differ in The noise key" in error for error in told["keys"])


@pytest.mark.parametrize("mode", ["fit", "loop by hand"])
def test_refuses_hosts_that_differ(mode, ran):
    """Without a folder, too: each host would sum or release something else."""
    for told in ran[1:3]:
        assert told["different"][f"{mode}: nothing"] == pytest.approx(5.2, abs=2)
        for what, name in CHANGES_ON_ONE_HOST.items():
            assert f"but they differ in {name}" in told["different"][f"{mode}: {what}"]


def test_fit_shares_a_run_between_processes(ran):
    *pair, alone = (each["fit"] for each in ran[1:])
    # Roundings are relative to the whole tree, and some entries are near zero.
    np.testing.assert_allclose(pair, [alone] * 2, rtol=0, atol=1e-5 * np.max(np.abs(alone)))
    assert pair[0] == pair[1]


def test_runs_are_shared_by_and_move_between_processes(ran):
    folder = ran[0]
    alone, summary = _result(ran, "alone")
    two, summary_of_two = _result(ran, "two")
    _assert_close(two, alone)
    for field in ("epsilon", "steps", "noise_multiplier", "padded_size"):
        assert summary_of_two[field] == summary[field]
    # Each process reads its own part of the samples. Padding also reads record 0, at the end, in
    # the part of the last process.
    reads = [
        [i for i in _reads(folder / "reads-two", process, compared=True) if i] for process in (0, 1)
    ]
    read_alone = _reads(folder / "reads-alone", 0, compared=False)
    assert sorted(reads[0] + reads[1]) == sorted(i for i in read_alone if i)
    assert min(map(len, reads)) > 0

    three, _ = _result(ran, "three")
    _assert_close(three, alone)

    # Two processes ran half of the steps; one ran the rest on other devices, or the other way.
    for name in ("moved", "grown"):
        moved, summary_of_moved = _result(ran, name)
        assert summary_of_moved["steps"] == 4
        _assert_close(moved, alone)


def test_hosts_share_cipher_keys(ran):
    """Checks noise by ChaCha20, batches by SHAKE-256, and a seed that one host draws."""
    two, summary = _result(ran, "ciphered")
    alone = load_params(ran[0] / "ciphered-alone" / "params.msgpack")
    _assert_close(two, alone)
    assert summary["generator"] == "SHAKE-256"
    drawn, summary = _result(ran, "drawn")
    assert summary["assumed_secret"] == []
    with pytest.raises(AssertionError):
        _assert_close(drawn, alone)
