"""Tests of a command's second start: imports and compilation before the first step."""

import dataclasses
import json
import os
import stat
import subprocess
import sys

import jax
import numpy as np
import pytest
from dpoptax.training.run.resolved import resolve

from dpoptax.training import TrainConfig
from dpoptax.training.run import chain, privacy
from dpoptax.training.run.seeds import Keys

CONFIG_FILE = """
from dpoptax.training import TrainConfig

def get_config():
    return TrainConfig(
        model="linear", steps=3, eval_every=2, batch_size=64, accountant="rdp", seed=0
    )
"""
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
MOST_PROGRAMS = 8


CONFIG = TrainConfig(model="linear", steps=3, eval_every=2, batch_size=64, accountant="rdp", seed=0)


@pytest.mark.slow
def test_second_start_compiles_nothing_and_gives_same_run(tmp_path):
    (tmp_path / "small.py").write_text(CONFIG_FILE)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("JAX_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    found, summaries, records = [], [], []
    for name in ("first", "second"):
        program = [sys.executable, "-c", WATCHED, "train", "small.py", "--workdir", name]
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[0]))
        summaries.append(json.loads((tmp_path / name / "summary.json").read_text()))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records.append([json.loads(line)["epsilon"] for line in lines])
    (_, first), (modules, second) = found
    requests = "/jax/compilation_cache/compile_requests_use_cache"
    misses = "/jax/compilation_cache/cache_misses"
    assert first[misses] == first[requests] <= MOST_PROGRAMS
    assert second[requests] == first[requests]
    assert misses not in second
    (folder,) = (tmp_path / "cache" / "dpoptax" / "compiled").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.glob("jit_step-*-cache"))) == 1
    assert not {name.partition(".")[0] for name in modules} & LATER
    assert records[0] == records[1]
    for name in ("params_sha256", "epsilon", "noise_multiplier", "steps", "test_loss"):
        assert summaries[0][name] == summaries[1][name]


def test_keys_use_all_bits_of_a_seed():
    def key_of(seed):
        config = dataclasses.replace(CONFIG, seed=seed)
        plan = privacy.make_run_plan(config, 1438)
        run = resolve(config, plan, num_classes=10)
        keys = jax.random.key_data(run.init_key), jax.random.key_data(run.chain.keys.noise)
        return np.concatenate(keys).tobytes()

    low = 12345
    assert len({key_of(low + (high << 32)) for high in (0, 1, 2, 2**30, 2**31 - 1)}) == 5
    init_key, key = jax.random.split(jax.random.key(low))
    plain = np.concatenate([jax.random.key_data(init_key), jax.random.key_data(key)])
    assert key_of(low) == plain.tobytes()


def test_compiled_initialization_contains_no_key():
    """Stored programs take keys as arguments, so one program serves all keys."""
    params = {"w": jax.numpy.ones((4, 3))}
    plan = privacy.make_run_plan(CONFIG, 1438)
    whole = resolve(CONFIG, plan, num_classes=10).chain
    of_seed = [dataclasses.replace(whole, keys=Keys.of(jax.random.key(seed))) for seed in (1, 2)]
    before = chain._begin._cache_size()
    for of_run in of_seed:
        one, each = of_run.begin(params), of_run.optimizer.init(params)
        assert jax.tree.structure(one) == jax.tree.structure(each)
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(each), strict=True):
            assert (left.aval.weak_type, left.dtype) == (right.aval.weak_type, right.dtype)
            if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
                left, right = jax.random.key_data(left), jax.random.key_data(right)
            np.testing.assert_array_equal(left, right)
    assert chain._begin._cache_size() <= before + 1
