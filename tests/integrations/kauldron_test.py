"""Tests private training with Kauldron. They need kauldron and gemma."""

import functools
import logging
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("kauldron", reason="kauldron is not installed: see docs/developers/testing.md")

import orbax.checkpoint as ocp
from absl import logging as absl_logging
from kauldron import kd
from kauldron.utils.config_util import ROOT_CFG_REF

import dpoptax
from dpoptax.integrations import _run
from dpoptax.integrations import kauldron as private
from tests.devices import check_on_eight_devices
from tests.integrations.kauldron_problem import (
    STEPS,
    Classifier,
    Normalized,
    make_chain,
    make_plan,
    make_rows,
    make_trainer,
    saved_each_step,
    train_by_hand,
    trained,
)
from tests.integrations.shared import (
    KEY,
    METHODS,
    OPTIONS,
    REFUSED_CHAINS,
    CountedRows,
    assert_equal,
    check_two_processes,
    make_correlated_plan,
    occurrences,
)

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def train(plan, folder, *args, **options):
    """Returns a trainer that has trained, and its last state."""
    trainer = make_trainer(plan, folder, *args, **options)
    return trainer, trainer.train()[0]


@pytest.mark.parametrize(("kind", "method"), [("full", m) for m in METHODS] + [("lora", "disk")])
def test_equals_loop_by_hand(kind, method, tmp_path):
    plan = make_plan()
    chain = make_chain(plan, methods=METHODS[method])
    trainer = make_trainer(plan, tmp_path, kind, optimizer=chain)
    first = trainer.init_state().params
    _, state = train(plan, tmp_path, kind, optimizer=chain)
    assert_equal(trained(state.params, kind), train_by_hand(plan, chain, first, kind))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.params, first)
    selected = moved if kind == "full" else kd.optim.select("lora")(first)
    assert moved == jax.tree.map(bool, selected) if kind == "lora" else all(jax.tree.leaves(moved))
    assert private.guarantee(trainer, state).releases[0].number == STEPS


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_those_of_clipped_grad(options, tmp_path):
    plan = make_plan()
    trainer, state = train(plan, tmp_path, step=options)
    first, chain = trainer.init_state().params, make_chain(plan)
    assert_equal(state.params, train_by_hand(plan, chain, first, **options))
    plain = train_by_hand(plan, chain, first)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (state.params, plain))))


def test_correlated_noise_equals_loop_by_hand(tmp_path):
    plan = make_correlated_plan(STEPS)
    trainer, state = train(plan, tmp_path)
    want = train_by_hand(plan, make_chain(plan), trainer.init_state().params)
    assert_equal(state.params, want)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_goes_on_from_checkpoint_of_kauldron(kind, tmp_path):
    plan = make_plan()
    _, whole = train(plan, tmp_path / "whole", kind)
    options = {"kind": kind, "checkpointer": kd.ckpts.Checkpointer(save_interval_steps=2)}
    _, stopped = train(plan, tmp_path / "run", **options, stop_after_steps=3)
    assert stopped.step == 3
    rows = {**make_rows(), "text": CountedRows(make_rows()["text"])}
    fresh = make_chain(plan, key=jax.random.key(9))  # the restored key wins
    options["checkpointer"] = kd.ckpts.Checkpointer(save_interval_steps=2)
    trainer, state = train(plan, tmp_path / "run", **options, rows=rows, optimizer=fresh)
    assert_equal(state.params, whole.params)
    assert private.guarantee(trainer, state).releases[0].number == STEPS
    expected = [indices for _, indices, _ in plan.new_run(KEY).draws()][2:]
    assert_equal(rows["text"].reads, expected)


def test_clip_that_adapts(tmp_path):
    plan, clip = make_plan(), dpoptax.contrib.adaptive_clip(1.0)
    chain = optax.chain(plan.new_run(KEY).noise(clip=clip), optax.adam(1e-2))
    _, state = train(plan, tmp_path, optimizer=chain, step={"clip": clip})
    assert state.opt_state[0].noise.count == STEPS
    masked = optax.masked(chain, lambda params: jax.tree.map(lambda x: True, params))
    with pytest.raises(ValueError, match="starts with MaskedState"):
        train(plan, tmp_path, optimizer=masked, step={"clip": clip})


def test_users_have_one_gradient_each(tmp_path):
    table = dpoptax.users.UserTable(np.arange(100) % 40, records_per_user=3, seed=0)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=8)
    plan = dpoptax.PrivacyPlan(steps=STEPS, sampler=sampler, noise_multiplier=1.0)
    data = private.plan_batches(plan, make_rows(), users=table)
    trainer, state = train(plan, tmp_path, train_ds=data)
    assert private.guarantee(trainer, state).event.unit == "user"


def private_values(plan, trainer):
    """Returns the loss and the gradient norm of a layer for the first private batch."""
    params = trainer.init_state().params
    batch = next(plan.new_run(KEY).batches(make_rows()))
    rows = jax.tree.map(jnp.asarray, batch.examples)

    def loss_fn(params):
        logits = Classifier().apply({"params": params}, rows["text"])["logits"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"][:, 0]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return [float(loss), float(jnp.linalg.norm(grads["Dense_0"]["kernel"]))]


def outputs(**options):
    """Returns settings of a trainer that writes all it can."""
    return {
        "writer": kd.train.KDMetricWriter(),
        "checkpointer": saved_each_step(),
        "profiler": kd.inspect.Profiler(
            first_profile=1, num_profile_steps=1, profile_duration_ms=0
        ),
        "log_metrics_every": 1,
        "log_summaries_every": 1,
        "train_metrics": {"norm": kd.metrics.Norm(tensor="grads.Dense_0.kernel", axis=None)},
        "train_summaries": {"words": kd.summaries.HistogramSummary(tensor="interms")},
        **options,
    }


def logged(caplog, run):
    """Runs with logging, and returns the log."""
    absl_logging.set_verbosity(absl_logging.INFO)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run()
    return caplog.text


def stored(folder, step):
    """Returns the numbers in a checkpoint of a trainer."""
    # It warns that it does not know where to place the arrays.
    with warnings.catch_warnings(action="ignore"), ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(folder / "checkpoints" / f"ckpt_{step}" / "default")
    return {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(found)}


def test_shows_nothing_of_private_batches(tmp_path, caplog, capfd):
    plan = make_plan()
    trainer = make_trainer(plan, tmp_path, **outputs())
    results = []
    text = logged(caplog, lambda: results.extend(trainer.train()))
    printed = capfd.readouterr()
    assert jax.tree.leaves(results[1]) == []
    assert "not shown: they have no noise" in text
    assert "perf_stats/steps_per_sec" in text
    assert not any(name in text for name in ("losses/", "metrics/", "summaries/"))
    assert len(list(tmp_path.rglob("*tfevents*"))) == 1
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    private_numbers = private_values(plan, trainer)
    assert occurrences(private_numbers, tmp_path, text + printed.out + printed.err) == []
    # Arrays in checkpoints are compressed.
    arrays = stored(tmp_path, STEPS - 1)
    assert all(name.startswith(("['params']", "['opt_state']", "['step']")) for name in arrays)
    floats = [x for x in arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) >= len(jax.tree.leaves(results[0].params))
    assert not any(np.isin(np.float32(private_numbers), np.asarray(x)).any() for x in floats)


def test_search_finds_losses_of_plain_trainer(tmp_path, caplog):
    plan = make_plan()
    batch = next(plan.new_run(KEY).batches(make_rows())).examples
    plain = {
        "trainstep": kd.train.TrainStep(),
        "optimizer": optax.adam(1e-2),
        "train_ds": kd.data.InMemoryPipeline(loader=lambda: batch, batch_size=len(batch["label"])),
    }
    trainer = make_trainer(plan, tmp_path, **outputs(train_summaries={}, **plain))
    text = logged(caplog, trainer.train)
    assert "losses/cross_entropy" in text
    found = occurrences(private_values(plan, make_trainer(plan, tmp_path)), tmp_path, text)
    assert "the log" in found
    assert any("tfevents" in name for name in found)


def traced(trainer, batch):
    """Returns the information flow of a trainer's compiled step, with all that it can return."""
    every = {"return_losses": True, "return_metrics": True, "return_summaries": True}

    def compiled(state, batch, key):
        inputs = _run.Inputs(*batch, key) if key is not None else batch
        return kd.train.TrainStep.step(trainer.trainstep, state, inputs, **every)

    key = None if isinstance(batch, dict) else jax.random.key(1)
    return dpoptax.information_flow(
        compiled, trainer.init_state(), batch, key, private_argnums=(1,), secret_argnums=(2,)
    )


def test_information_flow_finds_nothing_in_own_step(tmp_path):
    trainer = make_trainer(make_plan(), tmp_path, model=Classifier(dropout=0.5))
    batch = next(trainer.trainstep.plan.new_run(KEY).batches(make_rows()))
    flow = traced(trainer, (batch.examples, batch.mask, batch.ids))
    assert flow.private == ()
    assert {"public", "released", "secret"} == {shown.kind for shown in flow.shown}
    assert flow.joined == flow.redrawn == ()


def test_information_flow_finds_plain_step(tmp_path):
    plan = make_plan()
    plain = {"trainstep": kd.train.TrainStep(), "optimizer": optax.adam(1e-2)}
    trainer = make_trainer(plan, tmp_path, **plain)
    assert len(traced(trainer, next(plan.new_run(KEY).batches(make_rows())).examples).private) > 3


def make_public():
    return kd.data.InMemoryPipeline(loader=lambda: make_rows(8), batch_size=8, num_epochs=1)


def make_evaluator(data=None):
    return kd.evals.Evaluator(run=kd.evals.EveryNSteps(2), ds=data or make_public())


def test_evaluates_public_data(tmp_path, caplog):
    plan = make_plan()
    trainer = make_trainer(
        plan,
        tmp_path,
        step={"public_evals": ["test"]},
        evals={"test": make_evaluator()},
        writer=kd.train.KDMetricWriter(),
    )
    text = logged(caplog, trainer.train)
    assert text.count("losses/cross_entropy") == 2  # before steps 0 and 2


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_exports_parameters_and_statement_only(kind, tmp_path):
    trainer, state = train(make_plan(), tmp_path / "run", kind)
    folder = tmp_path / "public"
    found = private.export(trainer, state, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["params", "statement.txt"]
    assert [path.parent for path in found] == [folder, folder]
    with ocp.StandardCheckpointer() as checkpointer:
        assert_equal(checkpointer.restore(folder / "params", state.params), state.params)
    assert "one example" in (folder / "statement.txt").read_text("utf-8")


def test_record_has_its_own_randomness(tmp_path):
    """A record's gradient must not depend on its place in the batch, but on the step."""
    plan = make_plan(noise_multiplier=1e-6)
    trainer = make_trainer(plan, tmp_path, model=Classifier(dropout=0.5))

    def after_step(order, ids, key=0):
        rows = jax.tree.map(lambda x: x[np.array(order)], make_rows())
        inputs = _run.Inputs(rows, np.ones(2, bool), np.array(ids), jax.random.key(key))
        state, _ = kd.train.TrainStep.step(trainer.trainstep, trainer.init_state(), inputs)
        return np.asarray(state.params["Embed_0"]["embedding"])

    first = after_step([0, 1], [0, 1])
    np.testing.assert_allclose(after_step([1, 0], [1, 0]), first, rtol=0, atol=1e-6)
    assert np.max(np.abs(after_step([0, 1], [1, 0]) - first)) > 1e-3
    assert np.max(np.abs(after_step([0, 1], [0, 1], key=1) - first)) > 1e-3


def test_each_step_has_its_own_key(tmp_path):
    plan = make_plan()
    trainer = make_trainer(plan, tmp_path)
    state, data = trainer.init_state(), trainer.train_ds.data
    inputs = _run.step_inputs(data, state.opt_state, trainer.sharding.batch)
    keys = [tuple(np.asarray(jax.random.key_data(each.key))) for each in inputs]
    assert len({*keys}) == len(keys) == STEPS
    moved = make_trainer(plan, tmp_path, stop_after_steps=2).train()[0]
    later = next(_run.step_inputs(data, moved.opt_state, trainer.sharding.batch))
    assert tuple(np.asarray(jax.random.key_data(later.key))) == keys[2]


def partial_updates(plan):
    return kd.optim.partial_updates(make_chain(plan), kd.optim.select("Dense_0"))


def named_chain(plan):
    return kd.optim.named_chain(clip=optax.clip_by_global_norm(1.0), noise=make_chain(plan))


REFUSED_OPTIMIZERS = {
    **REFUSED_CHAINS,
    "clip before noise in a named chain": (named_chain, "starts with OrderedDict.*named chain"),
    "partial updates": (partial_updates, r"`PrivateTrainStep\(trained=mask\)`"),
}


@pytest.mark.parametrize(("chain", "message"), REFUSED_OPTIMIZERS.values(), ids=REFUSED_OPTIMIZERS)
def test_refuses_optimizer(chain, message, tmp_path):
    plan = make_plan()
    trainer = make_trainer(plan, tmp_path, optimizer=chain(plan))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trainer.train()


def test_refuses_models_with_other_variables(tmp_path):
    trainer = make_trainer(make_plan(), tmp_path, model=Normalized())
    with pytest.raises(ValueError, match="parameters, got.*batch_stats"):
        trainer.train()
    with pytest.raises(ValueError, match="`trained` must select parameters, got none"):
        make_trainer(make_plan(), tmp_path, step={"trained": kd.optim.select("lora")}).init_state()


REFUSED_SETTINGS = {
    "more steps than the plan": ({"num_train_steps": STEPS}, "num_train_steps.*must be at most"),
    "evaluation": (
        {"evals": {"test": make_evaluator()}},
        r"`PrivateTrainStep\(public_evals=.*test",
    ),
    "other data": ({"train_ds": make_public()}, r"plan_batches\(plan, rows\)"),
    "checks": ({"checkify_error_categories": frozenset(["nan"])}, "checkify_error_categories"),
    "batch sharding": ({"sharding": kd.sharding.ShardingStrategy(batch=None)}, "sharding.batch"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED_SETTINGS.values(), ids=REFUSED_SETTINGS)
def test_refuses_settings(options, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer(make_plan(), tmp_path, **options)


def test_stops_within_the_plan(tmp_path):
    trainer = make_trainer(make_plan(), tmp_path, num_train_steps=100, stop_after_steps=STEPS)
    assert trainer.num_train_steps == 100
    with pytest.raises(ValueError, match="num_train_steps.*must be at most"):
        trainer.replace(stop_after_steps=STEPS + 1)


def test_evaluators_get_no_private_rows(tmp_path):
    plan = make_plan()
    data = private.plan_batches(plan, make_rows())
    declared = {"step": {"public_evals": ["test"]}, "train_ds": data}
    assert jax.tree.leaves(next(iter(data))) == []
    for source in (data, data.take(1), ROOT_CFG_REF.train_ds):
        evaluator = kd.evals.Evaluator(run=kd.evals.EveryNSteps(2), ds=source)
        with pytest.raises(Exception, match=r"batch\.(text|label)"):
            train(plan, tmp_path, evals={"test": evaluator}, **declared)
    with pytest.raises(TypeError, match="list of names, got 'tests'"):
        make_trainer(plan, tmp_path, step={"public_evals": "tests"})


def test_refuses_plans(tmp_path):
    plan = make_plan()
    other = private.plan_batches(make_plan(noise_multiplier=2.0), make_rows())
    with pytest.raises(ValueError, match="another plan"):
        make_trainer(plan, tmp_path, train_ds=other)
    with pytest.raises(TypeError, match="must be a `dpoptax.PrivacyPlan`"):
        make_trainer(plan, tmp_path, trainstep=private.PrivateTrainStep(plan=None))


def test_step_reads_the_batch_of_its_number(tmp_path):
    plan = make_plan()
    rows = {**make_rows(), "text": CountedRows(make_rows()["text"])}
    trainer = make_trainer(plan, tmp_path, rows=rows)
    step = functools.partial(trainer.trainstep.step, batch=())
    _, _ = step(trainer.init_state())
    moved, _ = step(trainer.init_state())
    moved, _ = step(moved)
    assert_equal(moved.params, train(plan, tmp_path, stop_after_steps=2)[1].params)
    assert private.guarantee(trainer, moved).releases[0].number == 2
    assert_equal(rows["text"].reads[0], next(plan.new_run(KEY).draws())[1])


def test_refuses_wrong_steps(tmp_path):
    trainer = make_trainer(make_plan(), tmp_path)
    state, step = trainer.init_state(), trainer.trainstep.step
    with pytest.raises(TypeError, match=r"plan_batches\(plan, rows\)"):
        step(state, make_rows(8))
    for wrong in (functools.partial(step, batch=()), functools.partial(private.guarantee, trainer)):
        with pytest.raises(ValueError, match="counted the 1 steps of the trainer, got 0 releases"):
            wrong(state=state.replace(step=state.step + 1))


def test_refuses_folder_of_another_run(tmp_path):
    plan = make_plan()

    def start(plan=plan, **options):
        return train(plan, tmp_path, checkpointer=saved_each_step(), **options)

    start(stop_after_steps=2)
    more = private.plan_batches(make_plan(dataset_size=200), make_rows(200))
    with pytest.raises(ValueError, match="strategy, sampler or kind of noise differs"):
        start(more.data.plan, train_ds=more)
    changes = (
        {"step": {"clip": 2.0}},
        {"optimizer": optax.chain(plan.new_run(KEY).noise(), optax.adam(2e-2))},
        {"model": Classifier(dropout=0.5)},
    )
    for change in changes:
        with pytest.raises(ValueError, match="The model, its loss or the optimizer must be the"):
            start(**change)
    (tmp_path / "dpoptax_run.json").unlink()
    with pytest.raises(ValueError, match=r"no dpoptax_run\.json in the folder"):
        start()


@pytest.mark.parametrize("saved", [True, False])
def test_finished_run_refuses_a_corrected_row(saved, tmp_path):
    """Kauldron does not store the last state, so the last steps would be repeated."""
    plan, rows = make_plan(), make_rows()

    def start(key, rows, **options):
        every = kd.ckpts.Checkpointer(save_interval_steps=2 if saved else 100)
        chain = make_chain(plan, key=key)
        options |= {"rows": rows, "checkpointer": every, "optimizer": chain}
        return train(plan, tmp_path, **options)[1]

    first = start(KEY, rows)
    assert_equal(start(KEY, rows).params, first.params)
    corrected = {**rows, "label": rows["label"].copy()}
    corrected["label"][31] += 1
    for key in (KEY, jax.random.key(9)):
        with pytest.raises(
            ValueError, match=r"(sampler's seed|noise key|training examples) must be the same"
        ):
            start(key, corrected)
    # A step from other parameters would have the same noise, but Kauldron stores its first state.
    assert_equal(start(KEY, rows, seed=1).params, first.params)
    if not saved:
        shutil.rmtree(tmp_path / "checkpoints")
        with pytest.raises(ValueError, match="The initial parameters must be the same"):
            start(KEY, rows, seed=1)


def test_record_is_in_folder_of_checkpoints(tmp_path):
    plan, elsewhere = make_plan(), tmp_path / "elsewhere"

    def checkpointer():
        return kd.ckpts.Checkpointer(save_interval_steps=1, workdir=elsewhere)

    train(plan, tmp_path / "run", checkpointer=checkpointer(), stop_after_steps=2)
    assert (elsewhere / "dpoptax_run.json").exists()
    with pytest.raises(ValueError, match="The model, its loss or the optimizer must be the same"):
        train(plan, tmp_path / "other", checkpointer=checkpointer(), step={"clip": 2.0})


def test_programs_do_not_hold_noise_key(tmp_path):
    word = 0xDEADBEEF
    key = jax.random.wrap_key_data(jnp.array([word, 0x12345678], jnp.uint32))
    plan = make_plan()
    trainer = make_trainer(plan, tmp_path, optimizer=make_chain(plan, key=key))
    assert word in np.asarray(jax.random.key_data(trainer.init_state().opt_state[0].key))
    programs = []
    compile_program = jax.stages.Lowered.compile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered,
            "compile",
            lambda self, *a, **b: programs.append(self.as_text()) or compile_program(self, *a, **b),
        )
        assert trainer.state_specs.opt_state
    assert programs
    assert not any(str(word) in program for program in programs)
    assert str(word) in jax.jit(trainer.optimizer.init).lower(trainer.init_state().params).as_text()
    assert not hasattr(trainer.trainstep._init_optimizer, "lower")  # is not compiled


class Loaded(kd.ckpts.InitTransform):
    """Loads fields of another run's state."""

    def __init__(self, state, *names):
        self.state, self.names = state, names

    def transform(self, state):
        return state

    def transform_after_optimizer(self, state):
        return state.replace(**{name: getattr(self.state, name) for name in self.names})


def test_refuses_parameters_without_their_state(tmp_path):
    plan = make_plan()
    _, state = train(plan, tmp_path, stop_after_steps=2)
    with pytest.raises(ValueError, match="counted the 2 steps of the trainer, got 0 releases"):
        train(plan, tmp_path, init_transform=Loaded(state, "params", "step"))


def test_refuses_state_of_another_run(tmp_path):
    """Its first steps may have been drawn otherwise."""
    plan = make_plan()
    _, state = train(plan, tmp_path, stop_after_steps=2)
    loaded = Loaded(state, "params", "step", "opt_state")
    with pytest.raises(ValueError, match="must start at step 0, .*, got step 2"):
        train(plan, tmp_path, init_transform=loaded)
    with pytest.raises(ValueError, match="must start at step 0, .*, got step 2"):
        train(plan, tmp_path, init_transform=loaded, checkpointer=saved_each_step())


@pytest.mark.slow
def test_on_eight_virtual_devices():
    check_on_eight_devices("slow and not optimized", "tests/integrations/kauldron_devices.py")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    check_two_processes("kauldron_hosts", tmp_path)
