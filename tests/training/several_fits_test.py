"""Tests of `dpoptax.training.fit_runs`."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting
from dpoptax.training import fit_runs

DATA = np.linspace(0, 1, 60, dtype=np.float32)
OPTIONS = {"optimizer": optax.sgd(0.1), "progress": False}


def make_plan(**options):
    return dpoptax.PrivacyPlan(
        dataset_size=60, batch_size=20, steps=4, noise_multiplier=2.0, **options
    )


def evaluate(params):
    return {"value": float(params)}


def loss_fn(params, example):
    return (params - example) ** 2


def start(i):
    return jnp.full((), float(i))


def test_spread_and_guarantees():
    found = fit_runs(loss_fn, start, DATA, make_plan(), runs=3, evaluate=evaluate, **OPTIONS)
    starts = [result.history[0]["value"] for result in found.results]
    assert starts == [0.0, 1.0, 2.0]
    values = np.array([float(result.params) for result in found.results])
    mean, std = found.metrics["value"]
    assert (mean, std) == pytest.approx((values.mean(), values.std(ddof=1)))
    assert list(found.metrics) == ["value"]
    each = [result.guarantee for result in found.results]
    together = accounting.Guarantee(accounting.selection.all_of(each)).epsilon(1e-5)
    assert found.guarantee.stated_epsilon == together
    assert found.guarantee_of_one.stated_epsilon == each[0].stated_epsilon < together
    shown = str(found).splitlines()
    assert shown[1].startswith("  value ")
    assert shown[2].endswith(": " + str(each[0]).splitlines()[0])
    assert shown[3].endswith(": " + str(found.guarantee).splitlines()[0])


def test_runs_differ_in_batches_and_noise():
    found = fit_runs(loss_fn, lambda _: jnp.zeros(()), DATA, make_plan(), runs=3, **OPTIONS)
    assert len({float(result.params) for result in found.results}) == 3
    assert len({repr(sorted(result.guarantee.event.seeds)) for result in found.results}) == 3


def test_step_is_compiled_once():
    compiled = []

    def listen(event, _, **options):
        if event.endswith("backend_compile_duration") and options["fun_name"] == "jit(step)":
            compiled.append(options)

    counts = []

    def init(i):
        counts.append(len(compiled))
        return start(i)

    def new_loss_fn(params, example):  # another program than those of other tests
        return 1.7 * (params - example) ** 2

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fit_runs(new_loss_fn, init, DATA, make_plan(), runs=3, **OPTIONS)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts == [0, 1, 1]
    assert len(compiled) == 1


EARLIER = accounting.planned_guarantee(
    noise_multiplier=2.0, steps=4, sampler=dpoptax.sampling.PoissonSampler(60, 20, seed=1)
)
SELECTED = accounting.selection.best_of_random(
    [accounting.PrivacyEvent(dp_accounting.GaussianDpEvent(5.0))], mean=3, distribution="geometric"
)
OTHER_EVENTS = {
    "a run": EARLIER,
    "a selection": SELECTED,
    "an event": dp_accounting.GaussianDpEvent(3.0),
    "a statement": accounting.StatedDpEvent(0.5, 1e-7),
}


@pytest.mark.parametrize("name", OTHER_EVENTS)
def test_other_events_count_once_for_all_runs(name):
    plan, other = make_plan(), OTHER_EVENTS[name]
    private = make_plan(also=[other])
    found = fit_runs(loss_fn, start, DATA, private, runs=2, **OPTIONS)
    runs = [plan.guarantee().event] * 2
    once, twice = (
        accounting.Guarantee(accounting.selection.all_of([*runs, *[other] * times])).epsilon(1e-5)
        if times == 1 or name != "a run"
        else np.inf
        for times in (1, 2)
    )
    assert found.guarantee.stated_epsilon == pytest.approx(once)
    assert once < twice
    assert found.guarantee_of_one.stated_epsilon < found.guarantee.stated_epsilon
    assert len(found.guarantee.event.seeds) == 2 + (name == "a run")


def test_runs_without_a_price_do_not_train():
    calls = []
    plan = dpoptax.PrivacyPlan(
        dataset_size=60,
        batch_size=20,
        steps=4,
        noise_multiplier=2.0,
        accountant="rdp",
        also=[SELECTED],
    )
    unknown = accounting.PrivacyEvent(dp_accounting.UnsupportedDpEvent())
    plan.__dict__["also"] = (unknown,)  # such a plan cannot be made
    with pytest.raises(ValueError, match="does not support the event"):
        fit_runs(loss_fn, lambda i: calls.append(i) or start(i), DATA, plan, runs=2, **OPTIONS)
    assert not calls


def test_users_are_the_unit():
    table = dpoptax.users.UserTable(np.arange(60) // 2, records_per_user=2, seed=0)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=10)
    plan = dpoptax.PrivacyPlan(steps=2, sampler=sampler, noise_multiplier=2.0)
    found = fit_runs(loss_fn, start, DATA, plan, runs=2, users=table, **OPTIONS)
    assert found.guarantee.unit == "user"


@pytest.mark.slow
def test_interrupted_runs_resume(tmp_path):
    def stopped(params):
        if len(list(tmp_path.iterdir())) == 2 and not going_on:
            raise KeyboardInterrupt
        return evaluate(params)

    going_on = False
    run = {"runs": 2, "workdir": tmp_path, **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        fit_runs(loss_fn, start, DATA, make_plan(), evaluate=stopped, **run)
    going_on = True
    found = fit_runs(loss_fn, start, DATA, make_plan(), evaluate=stopped, **run)
    again = fit_runs(loss_fn, start, DATA, make_plan(), evaluate=stopped, **run)
    jax.tree.map(
        np.testing.assert_array_equal,
        [result.params for result in found.results],
        [result.params for result in again.results],
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run_0", "run_1"]


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (ValueError, "`runs` must be at least 2, got 1", {"runs": 1}),
        (TypeError, "`key` must not be given", {"key": jax.random.key(0)}),
        (TypeError, "`log` must not be given", {"log": []}),
    ],
)
def test_refusals(error, message, changed):
    arguments = {"plan": make_plan(), "runs": 2, **OPTIONS, **changed}
    with pytest.raises(error, match=message):
        fit_runs(loss_fn, start, DATA, **arguments)
