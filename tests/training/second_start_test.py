"""Tests of a command's second start: imports and compilation before the first step."""

import json
import os
import stat
import subprocess
import sys

import pytest

from dpoptax.runs import words_of
from dpoptax.training.run import seeds

# Prints the state after the first step and continues.
WATCHED = """
import collections, json, sys
import jax
from dpoptax.training.run.training_loop import TrainingLoop

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
advance = TrainingLoop.advance

def watched(self, batch):
    advance(self, batch)
    if self.state.done == 1:
        print(json.dumps([sorted(sys.modules), events]))

TrainingLoop.advance = watched
from dpoptax.training.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
LATER = {"matplotlib", "pandas", "jax_privacy", "PIL"}
MOST_PROGRAMS = 30  # most are small: the optimizer state is initialized operation by operation


@pytest.mark.slow
def test_second_start_compiles_nothing_and_gives_same_run(tmp_path):
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("JAX_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    found, summaries, records = [], [], []
    for name, seed in (("first", 0), ("second", 0), ("other key", 1)):
        program = [sys.executable, "-c", WATCHED, "train", "digits/dp_sgd", "--steps", "3"]
        program += ["--seed", str(seed), "--workdir", name]
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[0]))
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records.append([json.loads(line)["epsilon"] for line in lines])
    (_, first), (modules, second), (_, other) = found
    requests = "/jax/compilation_cache/compile_requests_use_cache"
    misses = "/jax/compilation_cache/cache_misses"
    assert first[misses] == first[requests] <= MOST_PROGRAMS
    assert second[requests] == first[requests]
    assert not {misses} & {*second, *other}  # no program contains a key
    (folder,) = (tmp_path / "cache" / "dpoptax" / "compiled").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.glob("jit_step-*-cache"))) == 1
    assert not {name.partition(".")[0] for name in modules} & LATER
    assert records[0] == records[1]
    assert summaries[2]["params_sha256"] != summaries[0]["params_sha256"]
    for name in ("params_sha256", "epsilon", "noise_multiplier", "steps", "test_loss"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.parametrize("generator", ["threefry", "chacha20"])
def test_keys_use_all_bits_of_a_seed(generator):
    chosen = [12345 + (high << 32) for high in (0, 1, 2, 2**30, 2**31 - 1, 2**200)]
    keys = {words_of(seeds.key_of(seed, generator)) for seed in chosen}
    assert len(keys) == len(chosen)
    (size,) = set(map(len, keys))
    assert size == {"threefry": 8, "chacha20": 32}[generator]
