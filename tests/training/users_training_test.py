"""Tests of runs with user-level privacy: guarantees, outputs and errors. The owners are made up."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax.sampling import PoissonSampler
from dpoptax.training import (
    MLP,
    Comparison,
    ConfigError,
    PlainPlan,
    classification,
    compare,
    config_of,
    train_and_evaluate,
)
from dpoptax.training.cli.main import main
from dpoptax.training.data import Dataset, load_digits
from dpoptax.training.run.run_task import run_task
from dpoptax.training.run.seeds import key_of
from dpoptax.training.search.sweep import Sweep, run_sweep
from dpoptax.users import UserTable
from tests.runs import memory_mapped

USERS = 50
# The writers of the digits are not published. Users have 1 to 73 examples, in data order.
MADE_UP = np.array([f"writer {place**2 % 101 % USERS}" for place in range(1438)])
KEY = key_of(0, "threefry")


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)


def of_users(
    epsilon: float | None = None,
    steps: int = 2,
    records_per_user: int = 4,
    learning_rate: float = 1.0,
    l2_clip_norm: float = 1.0,
    private: bool = True,
    in_users: bool = True,
    seed: int | None = None,
    held_out: bool = False,
    data: Dataset | None = None,
):
    data = load_digits(held_out=held_out) if data is None else data
    owners = MADE_UP[: data.train_size]
    table = UserTable(owners, records_per_user, seed=0) if in_users else None
    sampler = PoissonSampler(data.train_size, 10)
    if table is not None:
        sampler = table.sampler(PoissonSampler, batch_size=10)
    noise = {"noise_multiplier": 1.0} if epsilon is None else {"epsilon": epsilon}
    plan = PlainPlan(sampler, steps)
    if private:
        plan = dpoptax.PrivacyPlan(
            sampler=sampler, steps=steps, delta=1e-4, accountant="rdp", **noise
        )
    return classification(
        MLP(10, widths=()),
        data,
        plan,
        seed=seed,
        optimizer=optax.sgd(learning_rate),
        clip=l2_clip_norm,
        users=table,
        eval_every=steps,
    )


CONFIG = config_of(of_users)


@pytest.mark.slow
def test_user_level_run_states_unit_and_resumes(tmp_path):
    summary = train_and_evaluate(CONFIG.replace(seed=0), tmp_path, progress=False)
    assert (summary["unit"], summary["private"]) == ("user", True)
    assert summary["dataset_size"] == len(set(MADE_UP))
    assert train_and_evaluate(CONFIG.replace(seed=0), tmp_path, progress=False) == summary
    for changes in ({"records_per_user": 3}, {"in_users": False}):
        with pytest.raises(ValueError, match="must be the same as|must be"):
            train_and_evaluate(CONFIG.replace(seed=0, **changes), tmp_path, progress=False)


@pytest.mark.parametrize("private", [True, False])
def test_step_clips_mean_gradient_of_each_user(private, no_room):
    task = of_users(steps=1, learning_rate=2.0, l2_clip_norm=0.3, private=private)
    plan = task.plan
    if private:
        plan = dpoptax.PrivacyPlan(sampler=plan.sampler, steps=1, noise_multiplier=0.0, delta=1e-4)
        task = dataclasses.replace(task, plan=plan)
    result = run_task(task, key=KEY, progress=False)
    drawn = task.users.sample(dpoptax.runs.seeded(plan.sampler, KEY), 0)
    gradient, largest = jax.jit(jax.grad(task.loss_fn)), 0.0
    total = jax.tree.map(jnp.zeros_like, task.params)
    for records, mask in zip(
        drawn.records[drawn.mask], drawn.records_mask[drawn.mask], strict=True
    ):
        examples = [
            {name: jnp.asarray(a[place]) for name, a in task.data.items()}
            for place in records[mask]
        ]
        own = [gradient(task.params, example) for example in examples]
        own = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *own)
        norm = float(jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(own))))
        largest = max(largest, norm)
        scale = min(1.0, 0.3 / norm) if private else 1.0
        total = jax.tree.map(lambda a, g, s=scale: a + s * g, total, own)
    assert largest > 0.3
    expected = jax.tree.map(lambda p, g: p - 2.0 * g / 10, task.params, total)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), result.params, expected)


@pytest.mark.slow
def test_streamed_and_sharded_users_match_resident_users(tmp_path):
    task = of_users()
    for name, array in task.data.items():
        np.save(tmp_path / f"{name}.npy", array)
    mapped = dataclasses.replace(task, data=memory_mapped(tmp_path))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    resident, streamed, split = (
        run_task(each, key=KEY, progress=False, **options).params
        for each, options in ((task, {}), (mapped, {}), (task, {"mesh": mesh}))
    )
    jax.tree.map(np.testing.assert_array_equal, streamed, resident)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split, resident)


@pytest.mark.slow
def test_shipped_config_is_planned_and_trained_in_users(tmp_path, capsys, request):
    path = str(request.config.rootpath / "configs" / "users.py")
    assert main(["plan", path]) == 0
    assert "N = 34 users" in capsys.readouterr().out
    assert main(["train", path, "--workdir", str(tmp_path / "run")]) == 0
    assert "-differentially private for each user; written to " in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["unit"] == "user"


def test_held_out_split_keeps_owners_with_examples():
    digits = load_digits()
    marked = dataclasses.replace(digits, owners=digits.train["inputs"].sum(axis=(1, 2, 3)))
    part = marked.for_selection()
    np.testing.assert_array_equal(part.owners, part.train["inputs"].sum(axis=(1, 2, 3)))


def test_refuses_users_in_sweeps_and_mixed_units(tmp_path):
    config = CONFIG.replace(epsilon=3.0)
    with pytest.raises(ConfigError, match="`users` must be None in a sweep"):
        run_sweep({"a": config}, Sweep(tmp_path, grid=("steps=1,2",), trials=2), progress=False)
    both = {"a": config, "b": config.replace(in_users=False)}
    with pytest.raises(ConfigError, match="must be the same for all configs"):
        compare(both, Comparison(tmp_path), progress=False)


@pytest.mark.slow
def test_comparison_states_unit_of_users(tmp_path):
    comparison = Comparison(tmp_path, seeds=1, factors=(1.0,))
    found = compare({"a": CONFIG.replace(epsilon=8.0)}, comparison, progress=False)
    assert "The unit of ε is a user with all of its examples." in found.notes
