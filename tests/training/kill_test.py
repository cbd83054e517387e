"""Tests of runs killed at any moment, including checkpoint writes, and restarted."""

import hashlib
import json
import multiprocessing
import random
import time
from pathlib import Path

import jax
import pytest

import dpoptax
from dpoptax.training import train_config
from dpoptax.training.run import checkpoints, training_loop
from tests import runs

CONFIG = runs.CONFIG.replace(eval_every=7, checkpoint_every=5, batch_size=16)


def _train(steps, small, workdir):
    """Trains in a process that logs each step before its release."""
    workdir, checkpoints._SMALL = Path(workdir), small
    advance = training_loop.TrainingLoop.advance

    def logged(self, drawn):
        assert self.state.done >= max(self.context.earlier, default=0), (
            "repeats a step that was shown"
        )
        (ledger,) = dpoptax.ledgers(self.state.opt_state)
        before = hashlib.sha256()
        for leaf in jax.tree.leaves((drawn, self.state.params)):
            before.update(memoryview(jax.device_get(leaf)).cast("B"))
        with open(workdir / "released.log", "a") as log:
            log.write(f"{ledger.releases} {before.hexdigest()}\n")
        time.sleep(0.02)  # so that a run does not end before it is killed
        advance(self, drawn)

    training_loop.TrainingLoop.advance = logged
    train_config.train_and_evaluate(CONFIG.replace(steps=steps), workdir, progress=False)


def _start(context, *run):
    process = context.Process(target=_train, args=run)
    process.start()
    return process


def _finish(context, *run):
    process = _start(context, *run)
    process.join(240)
    assert process.exitcode == 0
    return json.loads((run[-1] / "summary.json").read_text())


def _writing(workdir):
    """Returns whether a checkpoint is being written, from unfinished files and directories."""
    return any((workdir / "checkpoints").glob("*.*-tmp*")) or any(workdir.glob("*/*.partial"))


def _kill(process, workdir, rng):
    """Kills a run at a random moment or during a write; returns whether it was unfinished."""
    log = workdir / "released.log"
    before = log.stat().st_size if log.exists() else 0
    # Usually after some steps, for progress, and sometimes at any moment.
    while rng.random() < 0.999 and process.is_alive():
        if log.exists() and log.stat().st_size > before:
            break
        time.sleep(0.01)
    during_a_write = rng.random() < 0.5
    time.sleep(rng.uniform(0, 1.0))
    deadline, was_writing = time.monotonic() + 5, False
    while during_a_write and process.is_alive() and time.monotonic() < deadline:
        if was_writing := _writing(workdir):
            break
    process.kill()
    process.join()
    return process.exitcode == -9, was_writing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "steps", "small"),
    [(3, 240, checkpoints._SMALL), (8, 300, checkpoints._SMALL), (8, 300, -1)],
    ids=["3", "8", "8, arrays"],
)
def test_killed_run_resumes_with_same_noise(kills, steps, small, tmp_path):
    context = multiprocessing.get_context("forkserver")  # imports once, so starts are cheap
    context.set_forkserver_preload(["tests.training.kill_test"])
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    want = _finish(context, steps, small, undisturbed)
    rng, hits, writes = random.Random(0), 0, 0
    for _ in range(3 * kills):
        hit, was_writing = _kill(_start(context, steps, small, killed), killed, rng)
        hits += hit
        writes += hit and was_writing
        if hits == kills or (killed / "summary.json").exists():
            break
    got = _finish(context, steps, small, killed)
    print(f"{hits} kills, {writes} of them while a checkpoint was written")
    for field in ("params_sha256", "epsilon", "steps", "test_loss"):
        assert got[field] == want[field]
    lines = (killed / "released.log").read_text().split("\n")
    released = {}
    for number, drawn in (line.split() for line in lines if len(line.split()) == 2):
        # The release under the noise of step t is always the same.
        assert released.setdefault(number, drawn) == drawn
    expected = dict(
        line.split() for line in (undisturbed / "released.log").read_text().splitlines()
    )
    assert released == expected
    assert len(expected) == steps
    assert hits >= 3
