"""Tests that runs of `fit` neither repeat shown steps nor meet other runs with the same noise."""

import os
import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._support import digests
from dpoptax.runs import digest_of, traced
from dpoptax.training import fit
from dpoptax.training.run.training_loop import TrainingLoop
from dpoptax.users import UserTable
from tests import helpers

N, WIDE = 300, 2000
KEY = jax.random.key(5)
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
SGD = optax.sgd(0.1)


def loss_fn(params, x):
    """Computes the squared distance of one example."""
    return jnp.sum((params - x) ** 2)


def train(folder, data=X, loss=loss_fn, *, steps=4, fixed_point=False, **options):
    """Fits in a folder and evaluates each step."""
    users = options.get("users")
    plan = {"steps": steps, "noise_multiplier": 2.0, "delta": 1e-4, "accountant": "rdp"}
    if users is None:
        plan |= {"dataset_size": N, "batch_size": 10}
    else:
        plan["sampler"] = users.sampler(dpoptax.sampling.PoissonSampler, batch_size=10)
    given = {"optimizer": SGD, "key": KEY, "eval_every": 1, "checkpoint_every": 100}
    plan = dpoptax.PrivacyPlan(**plan, fixed_point=fixed_point)
    given |= {"workdir": folder, "progress": False}
    return fit(loss, np.zeros(3), data, plan, **given | options)


def noise_key(result):
    """Returns the words of the key of the noise."""
    return tuple(jax.random.key_data(result.opt_state[0].key).tolist())


def newest(folder):
    """Returns the step of the newest complete checkpoint."""
    return max(int(p.stem) for p in (folder / "checkpoints").glob("*.json"))


class TestSavesBeforeShowing:
    """A state is shown after its checkpoint is complete."""

    def test_evaluations_and_records_follow_checkpoints(self, tmp_path):
        saved = []

        def evaluate(params):
            saved.append(newest(tmp_path))

        logged = []
        log = lambda record: logged.append((record["step"], newest(tmp_path)))  # noqa: E731
        train(tmp_path, steps=12, evaluate=evaluate, log=log)
        assert [step for step, _ in logged] == list(range(13))
        assert all(kept >= step for step, kept in logged)
        assert [kept >= step for step, kept in enumerate(saved)] == 13 * [True]

    @pytest.mark.parametrize("crash", [1, 3])
    @pytest.mark.parametrize("fixed_point", [False, True])
    def test_crash_in_evaluation_repeats_no_shown_step(
        self, crash, fixed_point, tmp_path, monkeypatch
    ):
        seen, advanced = [], []

        def evaluate(params):
            seen.append(np.asarray(params))
            if len(seen) == crash + 1:
                raise ZeroDivisionError

        options = {"evaluate": evaluate, "fixed_point": fixed_point}
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, **options)
        advance = TrainingLoop.advance

        def recorded(course, batch):
            advanced.append(course.state.done + 1)
            advance(course, batch)

        monkeypatch.setattr(TrainingLoop, "advance", recorded)
        result = train(tmp_path, **options)
        assert advanced == list(range(crash + 1, 5))
        assert [record["step"] for record in result.history] == [0, 1, 2, 3, 4]
        np.testing.assert_array_equal(seen[crash], seen[crash + 1])  # shown again, not repeated

    def test_says_from_which_step_it_continues(self, tmp_path, capsys):
        train(tmp_path, steps=2)
        train(tmp_path, steps=3, progress=True)
        assert f"dpoptax: continues the run in {tmp_path} after step 2" in capsys.readouterr().err
        train(tmp_path, steps=3, progress=True)
        assert f"the run in {tmp_path} after step 3 of 3" in capsys.readouterr().err


def weighted(weights):
    """Returns a loss that closes over many numbers."""
    weights = jnp.asarray(weights)
    return lambda params, x: loss_fn(params, x) * jnp.mean(weights)


def frozen_loss(params, x, *, frozen):
    return loss_fn(params, x) * jnp.mean(frozen)


def changed(values, place):
    values = np.array(values)
    values[place] *= -1
    return values


ONES = np.ones(WIDE, np.float32)
OWNERS = np.arange(N) // 3
CHANGES = {
    "numbers that the loss closes over": (
        {"loss": weighted(ONES)},
        {"loss": weighted(changed(ONES, 1234))},
    ),
    "a frozen array": (
        {"loss": frozen_loss, "frozen": ONES},
        {"loss": frozen_loss, "frozen": changed(ONES, 1234)},
    ),
    "a record of a list": ({"data": list(X)}, {"data": list(changed(X, 123))}),
    "an array of JAX": ({"data": jnp.asarray(X)}, {"data": jnp.asarray(changed(X, 123))}),
    "an owner": (
        {"users": UserTable(OWNERS, 2, seed=0)},
        {"users": UserTable(np.where(np.arange(N) == 100, 98, OWNERS), 2, seed=0)},
    ),
    "a learning rate": ({}, {"optimizer": optax.sgd(0.3)}),
    "a schedule": (
        {"optimizer": optax.sgd(optax.linear_schedule(1.0, 0.0, 9))},
        {"optimizer": optax.sgd(optax.linear_schedule(1.0, 0.0, 10))},
    ),
    "a setting in the state": (
        {"optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)},
        {"optimizer": optax.inject_hyperparams(optax.sgd)(learning_rate=0.3)},
    ),
    "a clip": ({}, {"clip": 0.5}),
}


class TestNoiseBelongsToProgramAndData:
    """Other programs or data are refused in the same folder, and have other noise elsewhere."""

    @pytest.mark.parametrize(
        "name", helpers.slow_but(("a frozen array", "an owner", "a learning rate"), CHANGES)
    )
    def test_changes_are_refused_or_have_other_noise(self, name, tmp_path):
        before, after = CHANGES[name]
        first = train(tmp_path / "run", **before)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        for folder, steps in (("run", 4), ("copy", 5)):  # finished, and with more steps
            with pytest.raises(ValueError, match=r"must be .* in the first 4"):
                train(tmp_path / folder, steps=steps, **after)
        assert noise_key(train(tmp_path / "other", **after)) != noise_key(first)
        again = train(tmp_path / "copy", **before)
        np.testing.assert_array_equal(again.params, first.params)
        assert noise_key(again) == noise_key(first)

    def test_host_functions_are_refused_in_a_folder(self, tmp_path):
        """Two functions look alike, and two copies of a run would add one noise to two sums."""
        row = jax.ShapeDtypeStruct((3,), np.float32)

        def outside(params, x):
            moved = jax.pure_callback(lambda x: -x, row, x, vmap_method="sequential")
            return loss_fn(params, moved)

        with pytest.raises(ValueError, match="must not call host functions .* got pure_callback"):
            train(tmp_path, loss=outside)
        assert not list((tmp_path / "checkpoints").iterdir())
        train(None, loss=outside, steps=1)

        def printing(params, x):
            jax.debug.callback(lambda: None)
            return loss_fn(params, x)

        train(tmp_path, loss=printing, steps=1)

    def test_other_draws_are_refused(self, tmp_path):
        def sampler(reverse):
            class Own(dpoptax.sampling.PoissonSampler):
                dp_event = dpoptax.sampling.PoissonSampler.dp_event

                def sample(self, step):
                    drawn = super().sample(step)
                    return drawn._replace(indices=N - 1 - drawn.indices) if reverse else drawn

            return Own(N, 10)

        def fitted(reverse, steps):
            plan = {"steps": steps, "noise_multiplier": 2.0, "sampler": sampler(reverse)}
            plan = dpoptax.PrivacyPlan(**plan, accountant="rdp")
            return fit(loss_fn, np.zeros(3), X, plan, workdir=tmp_path, progress=False)

        fitted(False, 2)
        with pytest.raises(ValueError, match="`sampler`, with its draws, must be the same"):
            fitted(True, 3)
        assert fitted(False, 3).steps == 3

    def test_initial_parameters_change_the_noise(self, tmp_path):
        plan = dpoptax.PrivacyPlan(dataset_size=N, batch_size=10, steps=1, noise_multiplier=2.0)
        found = {
            noise_key(
                fit(loss_fn, params, X, plan, key=KEY, workdir=tmp_path / name, progress=False)
            )
            for name, params in (("0", np.zeros(3)), ("1", np.ones(3)), ("2", np.zeros(3)))
        }
        assert len(found) == 2

    def test_memory_mapped_records_count(self, tmp_path):
        np.save(tmp_path / "x.npy", X)
        train(tmp_path / "run", np.load(tmp_path / "x.npy", mmap_mode="r"))
        np.save(tmp_path / "x.npy", changed(X, 123))
        with pytest.raises(
            ValueError, match="training examples must be the same as in the first 4"
        ):
            train(tmp_path / "run", np.load(tmp_path / "x.npy", mmap_mode="r"))


class TestDigests:
    """Digests cover all values, and are equal in all processes."""

    def test_digest_of_array_covers_each_value(self, monkeypatch):
        monkeypatch.setattr(digests, "_PART", 64)
        values = np.arange(1000, dtype=np.float32).reshape(100, 10)
        whole = digests.array_digest(values)
        assert digests.array_digest(jnp.asarray(values)) == whole
        assert digests.array_digest(np.asfortranarray(values)) == whole
        others = [values.reshape(10, 100), values.astype(np.float64), values[:-1]]
        others += [changed(values, place) for place in ((0, 1), (57, 3), (99, 9))]
        assert len({digests.array_digest(each) for each in others} | {whole}) == 7

    def test_digest_of_program_covers_nested_constants(self):
        def program(values, rate=0.1):
            values = jnp.asarray(values)

            def scanned(x):
                body = lambda total, v: (total + rate * v * x, None)  # noqa: E731
                return jax.lax.scan(body, 0.0, jax.jit(lambda: values * 2)())[0]

            return digest_of(traced(scanned, jnp.float32(1)))

        whole = program(ONES)
        assert program(ONES) == whole
        assert len({whole, program(changed(ONES, 1234)), program(ONES, 0.2)}) == 3

    @pytest.mark.slow
    def test_digest_of_program_is_equal_in_another_process(self):
        for seed in "12":
            program = "from tests.training.shown_steps_test import *; print(network_digest())"
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, env=environment
            )
            assert done.stdout.strip() == network_digest(), done.stderr


class Network(nn.Module):
    """A network with functions of its own derivative."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x)).reshape(4, -1)
        x = nn.LayerNorm()(nn.MultiHeadDotProductAttention(2)(nn.gelu(x)))
        return nn.Dense(2)(nn.silu(x).reshape(-1))


def network_digest():
    """Returns the digest of a clipped gradient of a network."""
    model, example = Network(), np.zeros((8, 8, 1), np.float32)
    params = model.init(jax.random.key(0), example)
    gradient = dpoptax.clipped_grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2), 1.0)
    batch = np.zeros((4, *example.shape), np.float32)
    return digest_of(traced(lambda *args: gradient(*args).sum, params, batch, np.ones(4, bool)))


def test_fits_without_jit(tmp_path):
    """`jax.disable_jit()` lets a user step through a loss."""
    expected = train(None)
    with jax.disable_jit():
        found = train(None, log=(logged := []))
    assert [record["step"] for record in logged] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(found.params, expected.params, rtol=1e-5)


def test_records_state_epsilon_of_their_step():
    plan = dpoptax.PrivacyPlan(dataset_size=1000, batch_size=50, steps=100, epsilon=3.0, delta=1e-5)
    options = {"eval_every": 10, "progress": False}
    history = fit(loss_fn, np.zeros(3), np.resize(X, (1000, 3)), plan, **options).history
    for record in history[1:]:
        event = plan.guarantee().event_after(record["step"])
        exact = dpoptax.accounting.Guarantee(event).epsilon(1e-5)
        assert exact <= record["epsilon"] <= 1.02 * exact
