"""Tests the benchmark for a GPU: results of tiny cases, skipped cases, and errors."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import contention, correctness, networks, tables, torch_steps
from benchmarks.gpu.networks import AUTO, PLAIN, Contender, Network
from benchmarks.gpu.schedule import Schedule, Task
from benchmarks.models import mlp


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs a command line and returns the results in its file."""
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that the values of the command are removed

    def run(*arguments):
        command.main(["--small", "--out", str(tmp_path), "--threads", "2", *arguments])
        return json.loads((tmp_path / "results.json").read_text())

    return run


@pytest.mark.parametrize("options", [[], ["--ahead"]])
def test_command_measures_steps_and_records_errors(run, monkeypatch, options):
    broken = Contender("dpoptax auto", microbatch_size=0)
    network = Network(lambda: mlp(16), 4, (PLAIN, AUTO, broken), 1.0)
    failing = network._replace(problem=lambda: 1 / 0)
    monkeypatch.setattr(networks, "SMALL", {"MLP": network, "failing": failing})
    monkeypatch.setattr(torch_steps, "SMALL", {})
    results = run("--sections", "steps", *options)
    assert results["about"]["platform"] == "cpu"
    found = results["steps"]["MLP"]
    assert found["non-private"]["time ratio"] == 1.0
    ours = found["dpoptax auto"]
    assert ours["finite"]
    assert ours["memory GiB"] > 0
    assert ours["time ratio"] == pytest.approx(ours["ms"] / found["non-private"]["ms"])
    assert "microbatch_size" in found[str(broken)]["error"]
    assert results["steps"]["failing"]["non-private"]["error"].startswith("ZeroDivisionError")


def test_command_checks_bounds_and_noise(run):
    names = ["noise", "noise in fixed point", "releases in fixed point as on CPU"]
    results = run("--sections", "correctness", "--only", *names, "regression, TF32")["correctness"]
    assert set(results) == {*names, "regression, TF32"}
    assert all(each["passed"] for each in results.values())
    assert 0.9 < results["regression, TF32"]["largest move / C"] <= 1


def test_masked_indices_that_move_a_sum_are_found():
    found = contention.measure(small=True)
    assert found["passed"]
    settings = list(contention._settings(np.random.default_rng(0), np.arange(8) % 4 == 0, 16))
    assert len({each[0].tobytes() for each in settings}) == 1  # those of used examples are equal
    assert contention.largest_move(lambda i: i[0], settings) == 0
    assert contention.largest_move(lambda i: i[0] + 1e-6 * i[1].mean(), settings) > 0


def test_broken_bound_and_noise_fail(monkeypatch):
    monkeypatch.setattr(correctness, "BOUND", 0.1 * (1 - 1e-3))
    monkeypatch.setattr(dpoptax, "l2_clip", lambda bound, exact=dpoptax.l2_clip: exact(0.1))
    assert not correctness.attack("regression", "TF32", small=True)["passed"]
    exact = dpoptax.gaussian_noise

    def smaller(*, noise_multiplier, **options):
        return exact(noise_multiplier=0.98 * noise_multiplier, **options)

    monkeypatch.setattr(dpoptax, "gaussian_noise", smaller)
    assert not correctness.noise_statistics(100_000)["passed"]


def test_masked_examples_that_move_the_sum_are_told_from_changing_results():
    batch = (np.ones((correctness.OTHERS + 1, 3), np.float32),)

    def exact(batch, mask):
        return jnp.sum(jnp.where(mask[:, None], batch[0], 0), axis=0)

    assert correctness._masked_move(exact, batch) == (0.0, 0.0)
    leak, again = correctness._masked_move(
        lambda batch, mask: exact(batch, mask) + 1e-4 * mask.any() * batch[0][-1], batch
    )
    assert (leak, again) == (np.inf, 0.0)  # by the NaN
    calls = itertools.count()
    moved, again = correctness._masked_move(
        lambda batch, mask: exact(batch, mask) * (1 + 1e-6 * (next(calls) % 3)), batch
    )
    assert 0 < moved < 1e-3
    assert 0 < again < 1e-3


def test_compares_sums_on_a_grid():
    found = correctness.sums_as_on_cpu()
    assert found["passed"]
    assert found["largest entry"] > 100


def test_tables_name_the_precision_and_take_the_last_run():
    step = {"ms": 1.0, "time ratio": 2.0, "memory ratio": 1.0, "compile s": 3.0}
    attack = {"passed": True, "largest move / C": 0.9}
    first = {"about": {}, "steps": {"MLP": {"dpoptax auto": step}}}
    first["correctness"] = {"tied, TF32": attack | {"passed": False}, "noise": {"passed": True}}
    second = {
        "about": {"default precision": "bfloat16"},
        "steps": {"MLP": {"skipped": "no time"}, "CNN": {"dpoptax auto": step}},
        "correctness": {"graph, TF32": attack},
    }
    attacks, checks, steps = tables.tables([first, second])
    assert "| TF32 | 2 | 1 | 0.900000 | tied |" in attacks
    assert "| noise | yes |" in checks
    assert "| MLP | dpoptax float32 | 1 | 2.00 | 1.00 | 3 |" in steps
    assert "| CNN | dpoptax bfloat16 |" in steps
    second["correctness"]["tied, TF32"] = attack
    assert "| TF32 | 2 | 2 |" in tables.tables([first, second])[0]


def test_skips_tasks_without_time(tmp_path):
    schedule, ran = Schedule(tmp_path, minutes=1.0), []
    tasks = [Task("long", 100.0, lambda: ran.append(1)), Task("short", 10.0, lambda: "done")]
    schedule.run("section", tasks)
    assert not ran
    assert schedule.results["section"]["short"] == "done"
    assert "needs about 100 s" in schedule.results["section"]["long"]["skipped"]
    # A task takes a hundredth of what was expected, so the next fits.
    schedule.run("next", [tasks[1], Task("long", 100.0, lambda: "also done")])
    assert schedule.results["next"]["long"] == "also done"
