"""Tests private fine-tuning with tunix. They need tunix."""

import logging
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("tunix", reason="tunix is not installed: see docs/developers/testing.md")

import orbax.checkpoint as ocp
from absl import logging as absl_logging
from flax import nnx
from tunix.sft import hooks, peft_trainer

import dpoptax
from dpoptax.integrations import tunix as private
from dpoptax.integrations._run import Inputs
from tests.devices import check_on_eight_devices
from tests.integrations.problem import (
    STEPS,
    make_chain,
    make_config,
    make_gemma,
    make_inputs,
    make_model,
    make_plan,
    make_rows,
    make_trainer,
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
SAVE_EACH = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=None)


def train(plan, model=None, chain=None, rows=None, **options):
    """Returns a trainer that has trained."""
    trainer = make_trainer(plan, model, chain, **options)
    trainer.train(private.plan_batches(plan, make_rows() if rows is None else rows))
    return trainer


@pytest.mark.parametrize(("kind", "method"), [("full", m) for m in METHODS] + [("lora", "adam")])
def test_equals_loop_by_hand(kind, method):
    plan = make_plan()
    chain = make_chain(plan, methods=METHODS[method])
    trainer = train(plan, make_model(kind), chain)
    assert_equal(trained(trainer), train_by_hand(plan, make_model(kind), chain, kind))
    first = trained(make_trainer(plan, make_model(kind)))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), trained(trainer), first)
    assert all(jax.tree.leaves(moved))
    assert private.guarantee(trainer).releases[0].number == STEPS


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_those_of_clipped_grad(options):
    plan = make_plan()
    chain = make_chain(plan)
    got = trained(train(plan, options=options))
    assert_equal(got, train_by_hand(plan, make_model(), chain, "full", **options))
    plain = train_by_hand(plan, make_model(), chain, "full")
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (got, plain))))


def test_correlated_noise_equals_loop_by_hand():
    plan = make_correlated_plan(STEPS)
    chain = make_chain(plan)
    assert_equal(trained(train(plan)), train_by_hand(plan, make_model(), chain, "full"))


def test_clip_that_adapts():
    plan, clip = make_plan(), dpoptax.contrib.adaptive_clip(1.0)
    chain = optax.chain(plan.new_run(KEY).noise(clip=clip), optax.adam(1e-2))
    assert private.guarantee(train(plan, chain=chain, clip=clip)).releases[0].number == STEPS


@pytest.mark.parametrize(("kind", "remat"), [("lora", "BLOCK"), ("full", "DECODER")])
def test_remat_equals_loop_by_hand_without_it(kind, remat):
    """Activations that are computed again may be rounded differently.

    Gradients then differ by about 1e-5 of their size, and Adam's six steps of 1e-2 by 6e-7.
    """
    plan = make_plan()
    got = trained(train(plan, make_gemma(kind, remat)))
    want = train_by_hand(plan, make_gemma(kind), make_chain(plan), kind)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=6e-7), got, want)


def test_lora_leaves_other_parameters():
    model = make_model("lora")
    _, _, before = nnx.split(model, nnx.LoRAParam, ...)
    before = jax.tree.map(np.asarray, nnx.as_pure(before))
    train(make_plan(), model)
    assert_equal(nnx.as_pure(nnx.split(model, nnx.LoRAParam, ...)[2]), before)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_goes_on_from_checkpoint_of_tunix(kind, tmp_path):
    plan, folder = make_plan(), str(tmp_path / "run")
    whole = trained(train(plan, make_model(kind)))
    rows = make_rows()
    counted = rows.replace(input_tokens=CountedRows(rows.input_tokens))
    train(plan, make_model(kind), rows=rows, max_steps=4, checkpoint_root_directory=folder)
    resumed = make_trainer(plan, make_model(kind), checkpoint_root_directory=folder)
    assert resumed.train_steps == 4
    assert private.guarantee(resumed).releases[0].number == 4
    resumed.train(private.plan_batches(plan, counted))
    assert_equal(trained(resumed), whole)
    expected = [indices for _, indices, _ in plan.new_run(KEY).draws()][4:]
    assert_equal(counted.input_tokens.reads, expected)


def test_users_have_one_gradient_each():
    table = dpoptax.users.UserTable(np.arange(100) % 40, records_per_user=3, seed=0)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=8)
    plan = dpoptax.PrivacyPlan(steps=2, sampler=sampler, noise_multiplier=1.0)
    trainer = make_trainer(plan, max_steps=2)
    trainer.train(private.plan_batches(plan, make_rows(), users=table))
    assert private.guarantee(trainer).event.unit == "user"


def private_losses(plan):
    """Returns the loss and perplexity that tunix would show for the first private batch."""
    (batch, *_) = plan.new_run(KEY).batches(make_rows())
    model = make_model()
    loss = peft_trainer._default_loss_fn(model, **make_inputs(batch.examples))
    return [float(np.float32(loss)), float(np.exp(np.float32(loss)))]


class Recorder(hooks.TrainingHooks):
    """Keeps what tunix passes to hooks and shows in its progress bar."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...

    def on_train_step_end(self, trainer, step, loss):
        self.seen += [loss, *trainer._pbar.metrics.values()]


def watched(trainer, caplog, run):
    """Runs a trainer and returns what its hooks saw and what its history holds."""
    recorder = Recorder()
    trainer.with_training_hooks(recorder)
    absl_logging.set_verbosity(absl_logging.INFO)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run(trainer)
    histories = trainer.metrics_logger._metrics.get("", {}).get("train", {})
    return recorder.seen, [x for name in histories for x in histories[name]]


def outputs_in(folder):
    return {
        "checkpoint_root_directory": str(folder / "run"),
        "checkpointing_options": SAVE_EACH,
        "metrics_logging_options": peft_trainer.MetricsLoggerOptions(
            log_dir=str(folder / "log"), flush_every_n_steps=1
        ),
    }


def test_shows_nothing_of_private_batches(tmp_path, caplog):
    plan = make_plan()
    trainer = make_trainer(plan, **outputs_in(tmp_path))
    seen, history = watched(
        trainer, caplog, lambda t: t.train(private.plan_batches(plan, make_rows()))
    )
    assert len(seen) >= STEPS
    assert np.all(np.isnan(seen))
    assert history == []
    assert "not shown: they have no noise" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert len(list(tmp_path.rglob("*tfevents*"))) == 1
    assert occurrences(private_losses(plan), tmp_path, caplog.text) == []


def test_search_finds_losses_of_plain_trainer(tmp_path, caplog):
    plan = make_plan()
    trainer = peft_trainer.PeftTrainer(
        make_model(), optax.adam(1e-2), make_config(**outputs_in(tmp_path))
    ).with_gen_model_input_fn(make_inputs)
    batches = [batch.examples for batch in plan.new_run(KEY).batches(make_rows())]
    seen, history = watched(trainer, caplog, lambda t: t.train(batches))
    assert len(history) == 3 * STEPS  # losses, perplexities and norms of gradients
    assert np.all(np.isfinite([*seen, *history]))
    found = occurrences(private_losses(plan), tmp_path, caplog.text)
    assert "the log" in found
    assert any("tfevents" in name for name in found)


def traced(trainer, batch):
    """Returns the information flow of the trainer's own step."""
    step = trainer.create_train_step_fn()
    graph, state = nnx.split((trainer.model, trainer.optimizer))

    def pure(state, batch):
        model, optimizer = nnx.merge(graph, state)
        shown = step(model, optimizer, batch)
        return nnx.as_pure(nnx.state((model, optimizer))), shown

    return dpoptax.information_flow(pure, nnx.as_pure(state), batch, private_argnums=(1,))


def test_information_flow_finds_nothing_in_own_step():
    plan = make_plan()
    trainer = make_trainer(plan)
    batch = next(plan.new_run(KEY).batches(make_rows()))
    flow = traced(trainer, Inputs(batch.examples, batch.mask))
    assert flow.private == ()
    assert {"public", "released", "secret"} == {shown.kind for shown in flow.shown}
    assert flow.joined == flow.redrawn == ()


def test_information_flow_finds_plain_step():
    trainer = peft_trainer.PeftTrainer(
        make_model(), optax.adam(1e-2), make_config()
    ).with_gen_model_input_fn(make_inputs)
    flow = traced(trainer, next(make_plan().new_run().batches(make_rows())).examples)
    assert len(flow.private) > 3


def test_evaluates_public_data_after_saving(tmp_path):
    plan, folder = make_plan(), tmp_path / "run"
    saved = []

    class Trainer(private.PrivateTrainer):
        def _write_metrics(self, buffer):
            if self._mode == "eval":
                saved.append((folder / str(self.train_steps) / "model_params").exists())
            super()._write_metrics(buffer)

    trainer = Trainer(
        make_model(),
        make_chain(plan),
        make_config(checkpoint_root_directory=str(folder)),
        plan=plan,
    ).with_gen_model_input_fn(make_inputs)
    public = [make_rows(4)]
    trainer.train(private.plan_batches(plan, make_rows()), public_eval_ds=public)
    assert saved == [True] * 4  # before the first step and after every second
    shown = trainer.metrics_logger.get_metric_history("", "loss", "eval")
    assert np.all(np.isfinite(shown))


def test_published_folders_hold_parameters_only(tmp_path):
    plan = make_plan()
    trainer = train(plan, make_model("lora"), **outputs_in(tmp_path))
    folders = private.publishable_folders(trainer)
    assert [folder.parent.name for folder in folders] == [str(1 + t) for t in range(STEPS)]
    with warnings.catch_warnings(action="ignore"):  # where the arrays will be placed
        found = ocp.PyTreeCheckpointer().restore(str(folders[-1]))
    found = [np.asarray(x) for x in jax.tree.leaves(found)]
    assert_equal(found, jax.tree.leaves(trained(trainer)))
    assert private.publishable_folders(make_trainer(plan)) == []


def test_record_has_its_own_randomness():
    """A record's gradient must not depend on its place in the batch, but on the step."""
    plan = make_plan(noise_multiplier=1e-6)

    def after_step(order, ids, step=0):
        trainer = make_trainer(plan, make_model(dropout=0.5))
        rows = jax.tree.map(lambda x: x[np.array(order)], make_rows())
        inputs = Inputs(rows, np.array([True, True]), np.array(ids), jax.random.key(step))
        nnx.jit(trainer.create_train_step_fn())(trainer.model, trainer.optimizer, inputs)
        return np.asarray(trainer.model.words[...])

    first = after_step([0, 1], [0, 1])
    np.testing.assert_allclose(after_step([1, 0], [1, 0]), first, rtol=0, atol=1e-6)
    assert np.max(np.abs(after_step([0, 1], [1, 0]) - first)) > 1e-3
    assert np.max(np.abs(after_step([0, 1], [0, 1], step=1) - first)) > 1e-3


class Normalized(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))


REFUSED = {
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
    "packing": ({"max_seq_token_per_tpu": 64}, "packing"),
    "more steps than the plan": ({"max_steps": STEPS + 1}, "`max_steps` must be at most"),
    "batch statistics": ({"model": Normalized}, "nnx.BatchStat.*norm.mean"),
    **{name: ({"chain": chain}, said) for name, (chain, said) in REFUSED_CHAINS.items()},
    "named chain": (
        {"chain": lambda plan: optax.named_chain(("noise", plan.new_run().noise()))},
        "starts with OrderedDict.*named chain",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(options, message):
    plan = make_plan()
    options = dict(options)
    model = options.pop("model", make_model)()
    chain = options.pop("chain", make_chain)(plan)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        train(plan, model, chain, **options)


@pytest.mark.parametrize(
    ("change", "arguments", "error", "message"),
    [
        (None, {"eval_ds": [make_rows()]}, ValueError, "`public_eval_ds`"),
        (None, {"train_ds": [make_rows()]}, TypeError, r"plan_batches\(plan, rows\)"),
        ("other plan", {}, ValueError, "another plan"),
        ("data_hooks", {}, ValueError, "`data_hooks` must not be set"),
        ("is_managed_externally", {}, ValueError, "`is_managed_externally` must not be set"),
        ("_train_steps", {}, ValueError, "counted the 1 steps of the trainer, got 0"),
    ],
)
def test_refuses_to_train(change, arguments, error, message):
    plan = make_plan()
    trainer = make_trainer(plan)
    if change == "other plan":
        plan = make_plan(noise_multiplier=3.0)
    elif change:
        setattr(trainer, change, 1)
    arguments = {"train_ds": private.plan_batches(plan, make_rows()), **arguments}
    with pytest.raises(error, match=message):
        trainer.train(**arguments)


def test_refuses_parameters_without_their_state(tmp_path):
    plan, folder = make_plan(), str(tmp_path)
    manager = peft_trainer.checkpoint_manager.CheckpointManager(folder)
    manager.save(4, make_model(), force=True)
    manager.close()
    with pytest.raises(ValueError, match="counted the 4 steps of the trainer, got 0 releases"):
        make_trainer(plan, checkpoint_root_directory=folder)


def test_refuses_folder_of_another_run(tmp_path):
    plan, folder = make_plan(), {"checkpoint_root_directory": str(tmp_path), "max_steps": 2}
    train(plan, **folder)
    fresh = make_chain(plan, key=jax.random.key(9))  # the restored key wins
    train(plan, chain=fresh, **folder)  # also after the last step
    rows, other = make_rows(), make_rows()
    other.input_tokens[17, 0] += 1
    larger = make_rows(200)
    changes = {
        "The training examples": {"rows": other},
        "The model, its loss or the optimizer": {"clip": 2.0},
    }
    for message, change in changes.items():
        with pytest.raises(ValueError, match=f"^{message} must be"):
            train(**{"plan": plan, "rows": rows, **change}, **folder)
    with pytest.raises(ValueError, match="strategy, sampler or kind of noise differs"):
        train(make_plan(dataset_size=200), rows=larger, **folder)
    steeper = optax.chain(plan.new_run(KEY).noise(), optax.adam(2e-2))
    with pytest.raises(ValueError, match="The model, its loss or the optimizer must be the same"):
        train(plan, chain=steeper, **folder)
    (tmp_path / "dpoptax_run.json").unlink()
    with pytest.raises(ValueError, match=r"no dpoptax_run\.json in the folder"):
        train(plan, **folder)


def test_refuses_another_key_without_checkpoint(tmp_path):
    plan, folder = make_plan(), {"checkpoint_root_directory": str(tmp_path), "max_steps": 1}
    unsaved = ocp.CheckpointManagerOptions(save_interval_steps=100)

    def start(*args, **options):
        for path in tmp_path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        train(plan, *args, checkpointing_options=unsaved, **options, **folder)

    start()
    start()
    with pytest.raises(
        ValueError, match="The sampler's seed must be the same"
    ):  # a hash of the key
        start(chain=make_chain(plan, key=jax.random.key(9)))
    other = make_model()
    other.words[...] += 1
    with pytest.raises(ValueError, match="The initial parameters must be the same"):
        start(other)


def test_refuses_plans():
    with pytest.raises(TypeError, match="must be a `dpoptax.PrivacyPlan`"):
        private.PrivateTrainer(make_model(), make_chain(make_plan()), make_config(), plan=None)


@pytest.mark.slow
def test_on_eight_virtual_devices():
    check_on_eight_devices("slow and not optimized", "tests/integrations/tunix_devices.py")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    check_two_processes("tunix_hosts", tmp_path)
