"""The second start of a command: what it imports and compiles before its first step, and trusts."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpoptax.training import loop
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import dataset as dataset_module
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import kept, privacy
from dpoptax.training.run.resolved import resolve
from dpoptax.training.run.seeds import Keys
from dpoptax.users import UserTable

CONFIG_FILE = """
from dpoptax.training.config import TrainConfig

def get_config():
    return TrainConfig(model="linear", steps=3, eval_every=2, batch_size=64, seed=0)
"""
# Prints what there is when the first step is done, and runs on.
WATCHED = """
import collections, json, sys
import jax
from dpoptax.training.run.phases import Phases

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
stepped = Phases.stepped

def watched(self):
    if self.first_step is None:
        print(json.dumps([sorted(sys.modules), events]))
    stepped(self)

Phases.stepped = watched
from dpoptax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
LATER = {"dp_accounting", "matplotlib", "pandas", "scipy", "sklearn", "jax_privacy", "PIL"}
# Some more than there are as this is written, 1530; dp_accounting alone brings 600.
MOST_MODULES = 1650
MOST_PROGRAMS = 8


CONFIG = TrainConfig(model="linear", steps=3, eval_every=2, batch_size=64, accountant="rdp", seed=0)


@pytest.mark.slow
def test_a_second_start_is_the_same_run_compiles_nothing_and_imports_what_it_needs(tmp_path):
    (tmp_path / "small.py").write_text(CONFIG_FILE)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("JAX_")}
    found, summaries, records = [], [], []
    for name in ("first", "second"):
        program = [sys.executable, "-c", WATCHED, "train", "small.py", "--workdir", name]
        program += ["--compilation-cache", "cache"]
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
    assert not {name.partition(".")[0] for name in modules} & LATER
    assert len(modules) < MOST_MODULES
    assert records[0] == records[1]
    for name in ("params_sha256", "epsilon", "noise_multiplier", "steps", "test_loss"):
        assert summaries[0][name] == summaries[1][name]


class TestKept:
    @pytest.fixture(autouse=True)
    def forgetful(self):
        """Each test, and each start of it, as in a process of its own."""
        self.forget()
        yield
        self.forget()

    @staticmethod
    def forget():
        privacy._noise_and_steps.cache_clear()
        privacy._curve.cache_clear()

    @pytest.fixture
    def started(self, tmp_path):
        """Starts a run by name; and the files of what was accounted, by how much they hold."""
        (tmp_path / "cache").mkdir()

        def start(name):
            self.forget()
            with kept.kept_in(tmp_path / "cache"):
                loop.train_and_evaluate(CONFIG, tmp_path / name, progress=False)
            files = (tmp_path / "cache").glob(kept.PATTERN.format("*"))
            found = {len(json.loads(file.read_text())): file for file in files}
            return found[2], found[3]

        return start

    def test_less_noise_than_the_budget_needs_ends_the_run_before_anything_is_written(
        self, started, tmp_path
    ):
        noise, _ = started("first")
        noise_multiplier, steps = json.loads(noise.read_text())
        noise.write_text(json.dumps([0.9 * noise_multiplier, steps]))
        with pytest.raises(
            ConfigError, match=r"kept of an earlier start, spends ε = 3\.\d+ in 3 st"
        ):
            started("second")
        assert not (tmp_path / "second" / "params.msgpack").exists()
        assert not (tmp_path / "second" / "summary.json").exists()

    def test_an_epsilon_that_was_shown_too_small_ends_the_run(self, started):
        _, curve = started("first")
        shown = json.loads(curve.read_text())
        curve.write_text(json.dumps([*shown[:-1], 0.5 * shown[-1]]))
        with pytest.raises(ConfigError, match=r"and 1\.\d+ was shown"):
            started("second")

    def test_a_file_that_cannot_be_read_is_computed_again(self, started):
        before = [file.read_text() for file in started("first")]
        for file in started("first again"):
            file.write_text("{")
        assert [file.read_text() for file in started("second")] == before

    def test_results_are_of_their_arguments_their_code_and_their_versions(
        self, tmp_path, monkeypatch
    ):
        calls = []

        @kept.keeping
        def computed(*args):
            calls.append(args)
            return len(calls)

        sampler = privacy.SAMPLERS["poisson"](100, 10, seed=0)
        with kept.kept_in(tmp_path):
            assert [computed(sampler, 1.0, None), computed(sampler, 1.0, None)] == [1, 1]
            assert computed(sampler, 1, None) == 2  # 1 and 1.0, as a repr tells them
            assert computed(dataclasses.replace(sampler, batch_size=11), 1.0, None) == 3
            assert computed(privacy.SAMPLERS["fixed_size"](100, 10, seed=0), 1.0, None) == 4
            monkeypatch.setattr(kept, "_versions", lambda: ["others"])
            assert computed(sampler, 1.0, None) == 5
        assert computed(sampler, 1.0, None) == 6  # kept nowhere
        with kept.kept_in(tmp_path):
            assert computed(sampler, 1.0, None) == 5

    def test_what_cannot_be_told_from_all_others_is_not_kept(self, tmp_path):
        calls = []

        class Own(privacy.SAMPLERS["poisson"]):
            pass

        @kept.keeping
        def computed(*args):
            calls.append(args)
            return len(calls)

        with kept.kept_in(tmp_path):
            for argument in (Own(100, 10, seed=0), np.ones(2), object(), (1, [Own(9, 3, seed=0)])):
                before = len(calls)
                assert [computed(argument), computed(argument)] == [before + 1, before + 2]
        assert not list(tmp_path.iterdir())

    def test_a_confirmation_raises_where_it_is_looked_at(self):
        def check():
            raise ZeroDivisionError

        confirmation = kept.Confirmation(check)
        with pytest.raises(ZeroDivisionError):
            confirmation.wait()
        with pytest.raises(ZeroDivisionError):
            confirmation.look()


def test_keys_take_all_bits_of_a_seed():
    def key_of(seed):
        config = dataclasses.replace(CONFIG, seed=seed)
        plan = privacy.make_plan(config, 1438)
        run = resolve(config, plan, num_classes=10, kind="images")
        keys = jax.random.key_data(run.init_key), jax.random.key_data(run.chain.keys.noise)
        return np.concatenate(keys).tobytes()

    low = 12345
    assert len({key_of(low + (high << 32)) for high in (0, 1, 2, 2**30, 2**31 - 1)}) == 5
    init_key, key = jax.random.split(jax.random.key(low))
    plain = np.concatenate([jax.random.key_data(init_key), jax.random.key_data(key)])
    assert key_of(low) == plain.tobytes()


def test_what_is_compiled_to_begin_a_run_holds_no_key():
    """Programs are kept on disk: one for all keys, which are among its arguments."""
    params = {"w": jax.numpy.ones((4, 3))}
    plan = privacy.make_plan(CONFIG, 1438)
    of_seed = [
        resolve(
            CONFIG, plan, num_classes=10, kind="images", keys=Keys.of(jax.random.key(seed))
        ).chain
        for seed in (1, 2)
    ]
    assert of_seed[0].compiled_begin(params) is of_seed[1].compiled_begin(params)
    for chain in of_seed:
        one, each = chain.begin(params), chain.optimizer.init(params)
        assert jax.tree.structure(one) == jax.tree.structure(each)
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(each), strict=True):
            assert (left.aval.weak_type, left.dtype) == (right.aval.weak_type, right.dtype)
            if jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key):
                left, right = jax.random.key_data(left), jax.random.key_data(right)
            np.testing.assert_array_equal(left, right)


def test_digits_are_those_of_scikit_learn():
    images, labels = dataset_module._digits()
    expected = load_digits(return_X_y=True)
    np.testing.assert_array_equal(images, expected[0])
    np.testing.assert_array_equal(labels, expected[1])


def test_owners_are_sorted_once(monkeypatch):
    tables = []
    monkeypatch.setattr(
        dataset_module,
        "UserTable",
        lambda *args, **seed: tables.append(UserTable(*args, **seed)) or tables[-1],
    )
    digits = dataclasses.replace(dataset_module.load_dataset("digits"), owners=np.arange(1438) // 5)
    assert digits.num_users == 288
    three, two = digits.users(3, seed=1), digits.users(2, seed=1)
    assert (three.records_per_user, two.records_per_user, len(tables)) == (3, 2, 1)
    sampler = privacy.SAMPLERS["poisson"](288, 20, seed=0)
    for table, bound in ((three, 3), (two, 2)):
        expected = UserTable(digits.owners, bound, seed=1).sample(sampler, 4)
        for left, right in zip(table.sample(sampler, 4), expected, strict=True):
            np.testing.assert_array_equal(left, right)
