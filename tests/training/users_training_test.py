"""Tests of runs with user-level privacy: guarantees, outputs and errors. The owners are made up."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dpoptax.training.methods import DPSGD, Disk, NonPrivate
from dpoptax.training.run.planning import plan_run, text
from dpoptax.training.run.privacy import make_run_plan, plan_on_data
from dpoptax.training.run.resolved import resolve

from dpoptax.training import Comparison, ConfigError, TrainConfig, compare, models
from dpoptax.training.cli.main import main
from dpoptax.training.data import dataset as data
from dpoptax.training.data import streaming
from dpoptax.training.loop import make_job, train, train_and_evaluate
from dpoptax.training.run import devices, seeds
from dpoptax.training.run.announcer import Announcer
from dpoptax.training.run.context import Context
from dpoptax.training.run.feeding import Feed
from dpoptax.training.search.sweep import Sweep, run_sweep
from experiments.data.published_data import load_published
from experiments.data.tokens import Tokens
from tests.published_texts import write_glue, write_published_model
from tests.runs import memory_mapped
from tests.training.fine_tuning_test import config_for
from tests.training.resume_test import StoppedError, outcome, run

USERS = 50
# The writers of the digits are not published. Users have 1 to 73 examples, in data order.
MADE_UP = [f"writer {place**2 % 101 % USERS}" for place in range(1438)]
OF_USERS = {"records_per_user": 4, "batch_size": 10, "steps": 2, "delta": 1e-4}


@data.register_dataset
def digits_of_writers():
    return dataclasses.replace(data.digits(), owners=np.array(MADE_UP))


OWNED = {"dataset": "digits_of_writers"}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)


@pytest.fixture(scope="module")
def digits():
    return digits_of_writers()


def config_of_users(**changes):
    given = {
        "seed": 0,
        "model": "linear",
        "accountant": "rdp",
        "eval_every": 2,
        "epsilon": None,
        "noise_multiplier": 1.0,
    }
    return TrainConfig(**{**given, **OF_USERS, **changes})


def trained(config, dataset, **options):
    return train(config, dataset, plan_on_data(config, dataset), **options)


@pytest.mark.slow
def test_user_level_run_states_unit_and_resumes(tmp_path):
    changes = {**OF_USERS, "steps": 4, **OWNED}
    whole = run(tmp_path / "whole", **changes)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["unit"] == "user"
    assert summary["records_per_user"] == 4
    assert summary["dataset_size"] == len(set(MADE_UP))
    assert summary["private"]
    assert str(len(MADE_UP)) not in (tmp_path / "whole" / "summary.json").read_text()
    with pytest.raises(StoppedError):
        run(tmp_path / "stopped", stop_before=3, **changes)
    assert outcome(run(tmp_path / "stopped", **changes)) == outcome(whole)
    with pytest.raises(ValueError, match="`records_per_user` must be 4, .* got 3"):
        run(tmp_path / "stopped", **{**changes, "records_per_user": 3})
    of_examples = {"records_per_user": None}
    with pytest.raises(ValueError, match="`dataset_size` must be .* got 1438"):
        run(tmp_path / "stopped", **{**changes, **of_examples})


@pytest.mark.parametrize("method", [DPSGD(), NonPrivate()])
def test_step_clips_mean_gradient_of_each_user(digits, method, no_room):
    config = config_of_users(
        method=method, steps=1, noise_multiplier=0.0, learning_rate=2.0, l2_clip_norm=0.3
    )
    plan = plan_on_data(config, digits)
    result = train(config, digits, plan)
    model = resolve(config, plan, num_classes=10)
    inputs = jnp.zeros((8, 8, 1))
    params, _ = config.initial_variables(model.model, inputs, model.init_key)
    loss, total = models.example_loss(model.model), jax.tree.map(jnp.zeros_like, params)
    drawn = digits.users(4, seed=plan.sampler.seed).sample(plan.sampler, 0)
    gradient = jax.jit(jax.grad(loss))
    largest = 0.0
    for records, mask in zip(
        drawn.records[drawn.mask], drawn.records_mask[drawn.mask], strict=True
    ):
        own = jax.tree.map(jnp.zeros_like, params)
        for place in records[mask]:
            example = {name: jnp.asarray(a[place]) for name, a in digits.train.items()}
            own = jax.tree.map(lambda a, g: a + g, own, gradient(params, example))
        count = mask.sum()
        own = jax.tree.map(lambda a, n=count: a / n, own)
        norm = float(jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(own))))
        largest = max(largest, norm)
        scale = min(1.0, 0.3 / norm) if method.private else 1.0
        total = jax.tree.map(lambda a, g, s=scale: a + s * g, total, own)
    assert largest > 0.3
    expected = jax.tree.map(lambda p, g: p - 2.0 * g / config.batch_size, params, total)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), result.params, expected)


@pytest.mark.slow
def test_streamed_and_sharded_users_match_resident_users(digits, tmp_path):
    config = config_of_users(method=Disk(), microbatch_size=4)
    for name, array in digits.train.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = dataclasses.replace(digits, train=memory_mapped(tmp_path))
    resident = trained(config, digits)
    assert trained(config, mapped).summary["params_sha256"] == resident.summary["params_sha256"]
    split = trained(config, digits, place=devices.start("devices"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split.params, resident.params
    )


def test_reads_user_records_from_arrays_and_sources():
    arrays = data.digits().train
    source = [{name: array[i] for name, array in arrays.items()} for i in range(20)]
    indices = np.array([[3, 3, 0], [19, 1, 2]])
    jax.tree.map(
        np.testing.assert_array_equal,
        streaming.read(source, indices),
        streaming.read(arrays, indices),
    )


@pytest.mark.parametrize("generator", ["threefry", "chacha20"])
def test_record_seed_depends_on_generator(digits, generator):
    config = config_of_users(seed=7, generator=generator)
    plan = plan_on_data(config, digits)
    run = resolve(config, plan, num_classes=10)
    place = devices.Devices()
    job, _ = make_job(run, digits, Context(place, Announcer()))
    drawn, _ = Feed(plan.sampler, job.data, place, users=job.users)(0)
    seed = int.from_bytes(seeds.derived(7, "records")) if generator == "chacha20" else 7
    own, other = (digits.users(4, seed=s).sample(plan.sampler, 0).records for s in (seed, seed + 1))
    assert np.array_equal(drawn.rows, own)
    assert not np.array_equal(drawn.rows, other)


@pytest.mark.slow
def test_plan_counts_users():
    cost = plan_run(config_of_users(**OWNED))
    assert cost.dataset_size == len(set(MADE_UP))
    assert cost.sampling_probability == 10 / cost.dataset_size
    printed = text("of users", cost)
    assert f"10 expected of {cost.dataset_size} users, at most 4 examples of each" in printed
    assert "add-or-remove-one user, poisson" in printed


@pytest.mark.slow
def test_shipped_config_is_planned_in_users(capsys):
    path = Path(__file__).parents[2] / "configs" / "users.py"
    assert main(["plan", str(path), "--accountant", "rdp"]) == 0
    assert "users, at most 16 examples of each" in capsys.readouterr().out
    assert "makes up" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_command_line_states_user_level_privacy(tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        "from dpoptax.training import TrainConfig\n"
        "def get_config():\n    return TrainConfig(records_per_user=4, steps=2, "
        "batch_size=10, model='linear', accountant='rdp', epsilon=None, noise_multiplier=1.0)\n"
    )
    options = ["--dataset", "digits_of_writers", "--workdir", str(tmp_path / "run")]
    assert main(["train", str(path), *options]) == 0
    assert "1e-05)-differentially private for each user; written to " in capsys.readouterr().out
    assert main(["train", str(path), "--workdir", str(tmp_path / "other")]) != 0
    assert "Register a Dataset with `owners`" in capsys.readouterr().err


TEXTS_OF = [f"user {place % 7}" for place in range(20)]


@pytest.fixture
def texts(tmp_path):
    """Returns a folder with a model and texts, and the options that assign owners to the texts."""
    pytest.importorskip("tokenizers")
    write_published_model(tmp_path / "roberta")
    write_glue(tmp_path, "sst2")
    path = tmp_path / "SST-2" / "train.tsv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()

    def write(users):
        lines = [f"{header}\tuser", *(f"{r}\t{u}" for r, u in zip(rows, users, strict=True))]
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")

    write(TEXTS_OF)
    return tmp_path, write


@pytest.mark.slow
def test_trains_on_texts_of_users(texts, tmp_path):
    changes = {**OF_USERS, "batch_size": 3, "records_per_user": 2, "seed": 0}
    config = config_for(texts[0], "sst2", **changes)
    summary = train_and_evaluate(config, tmp_path / "run", progress=False).summary
    assert (summary["dataset_size"], summary["unit"], summary["private"]) == (7, "user", True)


def test_reads_owners_from_column_of_texts(texts, tmp_path):
    write = texts[1]
    dataset = load_published("sst2", tmp_path, Tokens(tmp_path / "roberta", 12))
    assert dataset.owners.tolist() == TEXTS_OF
    assert dataset.units("user") == 7
    write([*TEXTS_OF[:-1], " "])
    with pytest.raises(ConfigError, match="line 21 has no user"):
        load_published("sst2", tmp_path, Tokens(tmp_path / "roberta", 12))


def test_refuses_bound_that_is_not_positive():
    with pytest.raises(ConfigError, match="`records_per_user` must be a positive integer, got 0"):
        config_of_users(records_per_user=0)


def test_refuses_bad_owners(digits):
    with pytest.raises(ConfigError, match="must have owners with `records_per_user`"):
        data.digits().units("user")
    with pytest.raises(ConfigError, match="one owner for each of its 1438 .* got 3"):
        dataclasses.replace(digits, owners=np.arange(3)).units("user")
    with pytest.raises(ValueError, match="one owner for each record"):
        dataclasses.replace(digits, owners=np.zeros((1438, 2), int)).units("user")
    with pytest.raises(ConfigError, match="`batch_size` must be at most .* users of"):
        make_run_plan(config_of_users(batch_size=1000), digits.units("user"))
    with pytest.raises(ConfigError, match="whole number of epochs .* users"):
        make_run_plan(
            config_of_users(batch_size=7, steps=10, sampling="random_allocation"),
            digits.units("user"),
        )


def test_held_out_split_keeps_owners_with_examples(digits):
    marked = dataclasses.replace(
        digits, train={**digits.train, "labels": np.arange(1438)}, owners=np.arange(1438)
    )
    part = marked.for_selection()
    np.testing.assert_array_equal(part.owners, part.train["labels"])


def test_refuses_users_in_sweeps_and_mixed_units(tmp_path):
    of_users = config_of_users(**OWNED, epsilon=3.0, noise_multiplier=None)
    with pytest.raises(ConfigError, match="`records_per_user` must be None in a sweep"):
        run_sweep({"a": of_users}, Sweep(tmp_path, grid=("steps=1,2",), trials=2), progress=False)
    of_examples = dataclasses.replace(of_users, records_per_user=None)
    with pytest.raises(ConfigError, match="`unit` must be the same for all configs"):
        compare({"a": of_users, "b": of_examples}, Comparison(tmp_path), progress=False)


@pytest.mark.slow
def test_comparison_states_unit_of_users(tmp_path):
    config = config_of_users(**OWNED, epsilon=8.0, noise_multiplier=None)
    comparison = Comparison(tmp_path, seeds=1, factors=(1.0,), processes=1)
    found = compare({"a": config}, comparison, progress=False)
    assert "The unit of ε is a user with all of its examples." in found.notes
