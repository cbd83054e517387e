"""The plan of a private run inside of a trainer, and checks of its rows and files."""

import struct
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax.training import hosts
from tests.multidevice.problem import assert_close
from tests.training import hosts_test

KEY = jax.random.key(3)
OPTIONS = (
    {"precision": "bfloat16"},
    {"microbatch_size": 4, "method": "recompute"},
)  # each changes rounding


def make_plan(*, steps, **options):
    run = {"dataset_size": 100, "batch_size": 10, "noise_multiplier": 1.0}
    return dpoptax.PrivacyPlan(**{**run, "steps": steps, **options})


def make_chain(plan, *, key=KEY, methods=()):
    return optax.chain(plan.new_run(key).noise(), *methods, optax.adam(1e-2))


def make_correlated_plan(steps):
    sampler = dpoptax.matrix.CyclicPoissonSampler(dataset_size=100, batch_size=10, cycle_length=2)
    strategy = dpoptax.matrix.optimal_banded_toeplitz(steps, 2)
    return make_plan(
        **{"steps": steps, "sampler": sampler, "strategy": strategy},
        dataset_size=None,
        batch_size=None,
    )


METHODS = {"adam": (), "disk": (dpoptax.disk(),), "doppler": (dpoptax.doppler(),)}
# Optimizers that no trainer accepts, and the errors.
REFUSED_CHAINS = {
    "no noise": (lambda plan: optax.adam(1e-3), "one noise stage, got 0"),
    "clip before noise": (
        lambda plan: optax.chain(optax.clip_by_global_norm(1.0), make_chain(plan)),
        "starts with EmptyState.*clip_by_global_norm",
    ),
    "several steps for each update": (
        lambda plan: optax.MultiSteps(make_chain(plan), 2).gradient_transformation(),
        "starts with MultiStepsState.*`optax.MultiSteps`",
    ),
    "noise of another plan": (
        lambda plan: make_chain(make_plan(steps=plan.steps, noise_multiplier=2.0)),
        "must be the plan's.*noise_multiplier=1.0.*got.*noise_multiplier=2.0",
    ),
}


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


class CountedRows(np.ndarray):
    """Records which rows are read by their numbers."""

    def __new__(cls, array):
        made = array.view(cls)
        made.reads = []
        return made

    def __getitem__(self, indices):
        if isinstance(indices, np.ndarray):
            self.reads.append(indices)
        return np.asarray(self)[indices]


def occurrences(numbers, folder, text):
    """Returns where numbers occur in files or in a text, in binary or with six digits."""
    found = []
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, content in {**files, "the log": text.encode()}.items():
        for x in numbers:
            forms = struct.pack("<f", x), struct.pack("<d", x), f"{x:.7g}"[:7].encode()
            found += [name for form in forms if form in content]
    return found


def check_two_processes(module, folder):
    """Checks that a module trains in two processes as in one, with four devices in both cases."""
    program = (
        "import sys; from dpoptax.training import hosts; hosts.join();"  # before all other imports
        f"from tests.integrations import {module}; {module}.main(sys.argv[1])"
    )
    for processes in (1, 2):
        command = [sys.executable, "-c", program, str(folder / str(processes))]
        hosts_test.start(command, processes, 4 // processes, cwd=Path(__file__).parents[2])
    found = {str(path.relative_to(folder)): dict(np.load(path)) for path in folder.glob("*/*.npz")}
    assert sorted(found) == ["1/0.npz", "2/0.npz", "2/1.npz"]
    assert_equal(found["2/0.npz"], found["2/1.npz"])
    assert_close(found["2/0.npz"], found["1/0.npz"], atol=1e-6)


def write_params(folder, params, mesh):
    """Writes the parameters that this process has, for `check_two_processes`."""
    leaves = jax.tree.leaves(hosts.replicate(params, mesh))
    assert leaves
    arrays = {str(i): np.asarray(x) for i, x in enumerate(leaves)}
    np.savez(Path(folder) / f"{jax.process_index()}.npz", **arrays)


def check_refused_on_hosts(start):
    """Checks that `start(key, shift, clip)`, with data moved by `shift`, refuses other hosts."""
    rank = jax.process_index()
    runs = (jax.random.fold_in(KEY, rank), 0, 1.0), (KEY, rank, 1.0), (KEY, 0, 1.0 + rank)
    for run in runs if jax.process_count() > 1 else ():
        with pytest.raises(ValueError, match="All hosts of a run must have the same"):
            start(*run)
