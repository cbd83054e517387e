"""Tests that `dpoptax.information_flow` names where private data left the path to the release."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import dpoptax
from dpoptax import information_flow
from dpoptax._information_flow import source_lines
from tests.information_flow.information_flow_test import (
    BATCH,
    CLIP,
    GAUSSIAN,
    MASK,
    NOISE,
    PARAMS,
    flow_of,
    loss_fn,
    paths,
)

# A library with an optimizer whose rate depends on a value that the step passes.
PLATEAU = """
import jax, optax

def scale_on_plateau():
    inner = optax.contrib.reduce_on_plateau()

    def update(updates, state, params=None, *, values=None, value=None, **extra):
        value = values.mean() if value is None else value
        return inner.update(updates, state, params, value=value, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)

def apply(params, updates):
    return jax.tree.map(lambda p, u: p + u, params, updates)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The module PLATEAU, as if it were installed."""
    path = tmp_path / "installed" / "plateau.py"
    path.parent.mkdir()
    path.write_text(PLATEAU)
    folders = (*source_lines._INSTALLED_FOLDERS, str(path.parent))
    monkeypatch.setattr(source_lines, "_INSTALLED_FOLDERS", folders)
    spec = importlib.util.spec_from_file_location("plateau", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (lambda values: {"value": values.mean()}, '{"value": values.mean()}'),
        (lambda values: {"values": values}, "tx.update(grads, opt_state, params, **"),
    ],
    ids=["mean of the user", "mean of the library"],
)
def test_names_where_a_value_left_the_path(given, code, installed):
    """The schedule's value is private, and through the rate all parameters and the schedule."""
    tx = optax.chain(GAUSSIAN, optax.sgd(0.1), installed.scale_on_plateau())
    twice_loss = lambda params, x: (loss_fn(params["a"] + params["b"], x),) * 2  # noqa: E731
    grad_fn = dpoptax.clipped_grad(twice_loss, CLIP, has_aux=True)

    @jax.jit
    def step(params, opt_state, batch, mask):
        grads, values = grad_fn(params, batch, mask)
        passed = given(values)
        updates, opt_state = tx.update(grads, opt_state, params, **passed)
        return installed.apply(params, updates), opt_state

    params = {"a": PARAMS, "b": PARAMS}
    flow = information_flow(step, params, tx.init(params), BATCH, MASK, private_argnums=(2, 3))
    assert {"[0]['a']", "[0]['b']"} <= paths(flow.private)
    (cause,) = {each.because for each in flow.private}
    assert cause.startswith("sources_test.py:")
    assert code in cause
    assert {each.because for each in flow.shown if each.kind != "private"} == {""}
    (row,) = [line for line in str(flow).splitlines() if line.startswith("private")]
    assert f"[0]['a'] and {len(flow.private) - 1} more" in row
    assert row.endswith(cause)


def test_rows_of_different_causes_stay_apart():
    def shows(params, opt_state, batch, mask, clipped):
        return {
            "a": batch.mean(),
            "b": mask.sum(),
            "norm": optax.tree.norm(clipped.sum),
        }

    flow = flow_of(shows)
    causes = {each.path: each.because.partition("`")[2] for each in flow.private}
    assert causes["[2]['a']"] == '"a": batch.mean(),`'
    assert causes["[2]['b']"] == '"b": mask.sum(),`'
    assert causes["[2]['norm']"] == '"norm": optax.tree.norm(clipped.sum),`'
    assert str(flow).count("\nprivate") + str(flow).startswith("private") == 3


def test_tables_of_the_noise_are_not_listed_as_closed_over():
    noise = dpoptax.gaussian_noise(**NOISE, fixed_point=True)
    assert flow_of(noise=noise).closed_over == ()
    table = jnp.arange(8192, dtype=jnp.uint32)
    shows = lambda params, *_: params + table[:3]  # noqa: E731
    assert flow_of(shows, noise=noise).closed_over == ("uint32[8192]",)
