"""Tests of the measurements on digits, with few settings and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.digits import batches, public
from experiments.digits.arms import Arm, initial_params, loss_fn, measure, split_digits


def moves(transform, params, updates):
    return transform.update(updates, transform.init(params), params)[0]


def test_digits_are_split_without_overlap():
    split = split_digits(50)
    sizes = [len(labels) for _, labels in split]
    assert sizes == [50, 1247, 250, 250]
    rows = np.concatenate([inputs for inputs, _ in split])
    assert len(np.unique(rows, axis=0)) == 1797
    np.testing.assert_array_equal(split_digits().private[0][:50], split.public[0])


@pytest.mark.slow
def test_public_gradient_is_mixed_or_alternated():
    columns = split_digits(20).public
    params = initial_params(jax.random.key(0))
    updates = jax.tree.map(jnp.ones_like, params)
    gradient = jax.grad(loss_fn)(params, columns)
    mixed = moves(public.added(columns, 0.25), params, updates)
    np.testing.assert_allclose(mixed["head"], 0.75 + 0.25 * gradient["head"], rtol=1e-5)
    moved = optax.apply_updates(params, updates)
    later = jax.grad(loss_fn)(moved, columns)
    turned = moves(public.alternated(columns, 0.5), params, updates)
    np.testing.assert_allclose(turned["head"], 1 - 0.5 * later["head"], rtol=1e-5)


@pytest.mark.slow
def test_best_setting_is_tested_on_other_seeds():
    split = split_digits(200)
    start = public.pretrained(jax.tree.map(jnp.asarray, split.public), 100)
    arm = Arm({"public_rate": (1e-4, 1.0)}, None, lambda _: optax.identity(), start)
    result = measure(arm, split, trials=4, seeds=3)
    assert result.settings["public_rate"] > 0.05
    assert result.accuracies.shape == (3,)
    assert result.accuracies.mean() > 70


@pytest.mark.slow
def test_pages_have_a_row_for_each_arm(monkeypatch):
    page = batches.batches_page(trials=1, seeds=2, epochs=1)
    assert "| 32 " in page
    assert "`suggest_plan` chooses B = " in page
    every = public.public_arms
    monkeypatch.setattr(public, "STEPS", 5)
    few = ("public only", "pretrained and added")
    monkeypatch.setattr(
        public, "public_arms", lambda split: {name: every(split)[name] for name in few}
    )
    page = public.public_page(trials=1, seeds=2, sizes=(50,))
    for arm in few:
        assert f"| {arm} " in page
