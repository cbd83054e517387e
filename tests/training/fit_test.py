"""Tests of `dpoptax.training.fit`: the loop by hand, data sources, stops, logs and refusals."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Hashable
from typing import Any
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting
from dpoptax.training import fit
from dpoptax.training.data import streaming
from dpoptax.training.run import averaging, step, training_loop
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.users import UserTable
from tests import helpers

N, STEPS = 60, 6
KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5)).astype(np.float32)
Y = RNG.integers(3, size=N)
MLP = helpers.mlp_params(0)
ADAM = optax.adam(1e-2)


def linear_loss(params, example):
    """Computes the squared error of one example, which compiles quickly."""
    x, y = example
    return 0.5 * (x @ params - y) ** 2


def make_plan(**changes):
    values = {"batch_size": 12, "steps": STEPS, "noise_multiplier": 2.0}
    return dpoptax.PrivacyPlan(dataset_size=N, accountant="rdp", **values | changes)


def make_correlated_plan():
    strategy = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
    sampler = dpoptax.matrix.CyclicPoissonSampler(N, 12, cycle_length=2)
    return dpoptax.PrivacyPlan(
        sampler=sampler, steps=STEPS, noise_multiplier=2.0, strategy=strategy
    )


PROGRAMS: dict[Hashable, Any] = {}


def quiet(data=(X, Y), plan=None, loss_fn=linear_loss, params=None, **options):
    """Fits without a progress bar; equal runs share a program."""
    plan = make_plan() if plan is None else plan
    params = np.zeros(5) if params is None else params
    given, make = {"optimizer": ADAM} | options, training_loop.compiled_step
    names = ("optimizer", "clip", "microbatch_size", "grad_fn")
    parts = loss_fn, *map(given.get, names), "users" in given

    def shared(step, args, *mesh):
        # The types of the arguments contain the mechanism of the noise.
        leaves, structure = jax.tree.flatten(jax.eval_shape(lambda *args: args, *args))
        key = *parts, plan.sampler.batch_size, tuple(leaves), structure
        if key not in PROGRAMS:
            PROGRAMS[key] = make(step, args, *mesh)
        return PROGRAMS[key]

    with mock.patch.object(training_loop, "compiled_step", shared):
        return fit(loss_fn, params, data, plan, progress=False, **given)


def by_hand(grad_fn, params, optimizer=ADAM, options=lambda step, indices: {}, key=KEY):
    """Returns the parameters of a loop that calls the library's parts."""
    run = make_plan().new_run(key)
    tx = optax.chain(run.noise(), optimizer)

    @jax.jit
    def update(params, opt_state, batch, mask, step, indices):
        points = dpoptax.gradient_points(opt_state, params)
        clipped = grad_fn(points, batch, mask, **options(step, indices))
        updates, opt_state = tx.update(clipped, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in run.batches((X, Y)):
        params, opt_state = update(
            params, opt_state, batch.examples, batch.mask, batch.step, batch.ids
        )
    return params


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def reference():
    return by_hand(dpoptax.clipped_grad(linear_loss, 1.0), jnp.zeros(5))


def test_two_calls_with_one_plan_are_independent_runs():
    plan = make_plan()
    results = [quiet(plan=plan) for _ in range(2)]
    assert [result.run.step for result in results] == [STEPS, STEPS]
    guarantees = [result.guarantee for result in results]
    both = accounting.selection.all_of(guarantees)
    # The price of the pair is that of one run of twice the steps.
    longer = dataclasses.replace(plan, steps=2 * STEPS).guarantee()
    priced = dataclasses.replace(guarantees[0], event=both)
    assert priced.epsilon(1e-5) == pytest.approx(longer.epsilon(1e-5))
    third = dataclasses.replace(plan, also=guarantees)
    assert third.epsilon > priced.epsilon(1e-5)


class Records:
    """A source of records, as grain has them."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return X[index], Y[index]


SOURCES = {
    "arrays": lambda folder: (X, Y),
    "arrays of JAX": lambda folder: (jnp.asarray(X), jnp.asarray(Y)),
    "memory-mapped": lambda folder: (np.load(folder / "x.npy", mmap_mode="r"), Y),
    "a list of examples": lambda folder: list(zip(X, Y, strict=True)),
    "a source": lambda folder: Records(),
    "grain": lambda folder: grain.MapDataset.source(Records()),
    "an array and a list": lambda folder: (X, list(Y)),
}


@pytest.mark.parametrize("name", helpers.slow_but(("arrays", "memory-mapped", "a source"), SOURCES))
def test_every_kind_of_data_matches_manual_loop(name, reference, tmp_path):
    np.save(tmp_path / "x.npy", X)
    data = SOURCES[name](tmp_path)
    assert streaming.in_memory(data) == name.startswith("arrays")
    result = quiet(data, key=KEY)
    assert_same(result.params, reference)
    assert result.steps == STEPS
    assert result.guarantee.stated_epsilon == pytest.approx(make_plan().epsilon)
    assert dpoptax.ledgers(result.opt_state)[0].releases == STEPS


@pytest.mark.slow
def test_disk_with_microbatches_matches_manual_loop():
    optimizer = optax.chain(dpoptax.disk(), optax.sgd(0.1))
    network = {"loss_fn": helpers.mlp_loss, "params": MLP}
    result = quiet(key=KEY, optimizer=optimizer, microbatch_size=4, **network)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, 1.0, microbatch_size=4)
    assert_same(result.params, by_hand(grad_fn, MLP, optimizer))


def test_loss_with_key_and_frozen_matches_manual_loop():
    scale = np.full(5, 0.5, np.float32)

    def loss_fn(params, example, key, *, frozen):
        x, y = example
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return linear_loss(params, (x * kept * frozen["scale"], y))

    result = quiet(loss_fn=loss_fn, frozen={"scale": scale}, clip=0.7, key=KEY)
    of_step = jax.random.fold_in(KEY, 2**32 - 1)
    grad_fn = dpoptax.clipped_grad(lambda *args: loss_fn(*args, frozen={"scale": scale}), 0.7)
    expected = by_hand(
        grad_fn,
        jnp.zeros(5),
        options=lambda step, ids: {"key": jax.random.fold_in(of_step, step), "ids": ids},
    )
    assert_same(result.params, expected)


GIVEN_GRADIENT = dpoptax.clipped_grad(linear_loss, 1.0)


def test_given_gradient_drops_auxiliary_outputs(reference):
    grad_fn = dpoptax.clipped_grad(lambda *args: (linear_loss(*args), args[1]), 1.0, has_aux=True)
    assert_same(quiet(loss_fn=None, grad_fn=grad_fn, key=KEY).params, reference)


def test_given_gradient_equals_default(reference):
    assert_same(quiet(loss_fn=None, grad_fn=GIVEN_GRADIENT, key=KEY).params, reference)
    vmap = {"microbatch_size": 4, "method": "vmap", "return_values": True}
    grad_fn = dpoptax.clipped_grad(linear_loss, 1.0, **vmap)
    result = quiet(loss_fn=None, grad_fn=grad_fn, clip=1.0, key=KEY)
    assert_same(result.params, by_hand(lambda *args: grad_fn(*args)[0], jnp.zeros(5)))


def test_given_gradient_gets_keys_frozen_arrays_and_users():
    def loss_fn(params, example, key, frozen):
        return linear_loss(params + frozen, example) * jax.random.bernoulli(key)

    def grad_fn(points, batch, mask, *, key, ids, frozen):
        loss = dpoptax.users.per_user_loss(functools.partial(loss_fn, frozen=frozen))
        return dpoptax.clipped_grad(loss, 1.0)(points, batch, mask, key=key, ids=ids)

    users = UserTable(np.arange(N) % 30, records_per_user=2, seed=1)
    sampler = users.sampler(dpoptax.sampling.PoissonSampler, batch_size=5)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=2, noise_multiplier=2.0)
    options = {"plan": plan, "users": users, "key": KEY, "frozen": np.ones(5, np.float32)}
    given = quiet(loss_fn=None, grad_fn=grad_fn, **options)
    assert_same(given.params, quiet(loss_fn=loss_fn, **options).params)


def test_given_gradient_shares_batches_over_a_mesh(reference, tmp_path):
    explicit = jax.make_mesh((jax.device_count(),), ("data",))
    with pytest.raises(ValueError, match="`mesh` must have automatic axes with `grad_fn`"):
        quiet(loss_fn=None, grad_fn=GIVEN_GRADIENT, mesh=explicit)
    mesh = jax.sharding.Mesh(explicit.devices, ("data",))
    grad_fn = dpoptax.clipped_grad(linear_loss, 1.0, mesh=mesh)
    result = quiet(loss_fn=None, grad_fn=grad_fn, mesh=mesh, key=KEY)
    np.testing.assert_allclose(result.params, reference, rtol=1e-5)
    quiet(loss_fn=None, grad_fn=grad_fn, mesh=mesh, workdir=tmp_path)


def test_equal_programs_are_compiled_once():
    """A constant of the loss or optimizer makes another program to compile.

    A key and frozen arrays do not.
    """

    def run(factor=1.0, rate=0.1, key=KEY, frozen=1.0):
        def loss_fn(params, example, frozen):
            factors = frozen * np.full(5, factor, np.float32)
            return linear_loss(params, (example[0] * factors, example[1]))

        before = set(step._COMPILED)
        options = {"optimizer": optax.sgd(rate), "key": key, "progress": False}
        options["frozen"] = np.full(5, frozen, np.float32)
        params = fit(loss_fn, np.zeros(5), (X, Y), make_plan(), **options).params
        return params, len(set(step._COMPILED) - before)

    first, _ = run()
    again, compiled = run()
    assert_same(first, again)
    assert compiled == 0
    for changes, count in (
        ({"key": jax.random.key(4)}, 0),
        ({"frozen": 1.5}, 0),
        ({"factor": 1.5}, 1),
        ({"rate": 0.2}, 1),
    ):
        other, compiled = run(**changes)
        assert compiled == count, changes
        assert not np.array_equal(first, other), changes


def test_programs_with_unknown_parts_are_not_compared():
    """A host function is known by its number only, and large constants are not written out."""

    def identity(function):
        program = jax.jit(function).trace(jnp.zeros(3))
        return step._identity(program, program.lower(), None)

    assert identity(jnp.sin) == identity(jnp.sin) != identity(jnp.cos)
    assert identity(lambda x: jax.debug.print("{}", x)) is None
    large = np.ones(2**18 + 1, np.float32)
    assert identity(lambda x: x[0] * jnp.asarray(large)) is None
    assert identity(lambda x: x[0] * jnp.asarray(large[1:])) is not None
    with jax.default_matmul_precision("highest"):
        precise = identity(lambda x: x @ x)
    assert precise != identity(lambda x: x @ x)


def test_fits_with_user_level_privacy():
    table = UserTable(np.arange(N) // 3, records_per_user=2, seed=1)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=5)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=STEPS, noise_multiplier=2.0)
    result = quiet(plan=plan, users=table)
    assert result.guarantee.unit == "user"
    with pytest.raises(ValueError, match="`users` must be the table .* got None .* draws users"):
        quiet(plan=plan)
    with pytest.raises(
        ValueError, match="`users` must be the table .* got UserTable.* draws examples"
    ):
        quiet(users=table)
    with pytest.raises(
        ValueError, match="must have 60 rows, one for each record of `users`, got 59"
    ):
        quiet((X[1:], Y[1:]), plan=plan, users=table)


def test_fits_with_correlated_noise():
    plan = make_correlated_plan()
    (ledger,) = dpoptax.ledgers(quiet(plan=plan).opt_state)
    assert ledger.mechanism.strategy == plan.strategy


def test_fits_and_resumes_with_adaptive_clip(tmp_path):
    clip = dpoptax.contrib.adaptive_clip(1.0, quantile=0.2)
    first = quiet(clip=clip, workdir=tmp_path)
    assert float(dpoptax.gradient_points(first.opt_state, np.zeros(5)).reference) != 1.0
    (stage,) = first.guarantee.releases
    assert (stage.number, stage.generator) == (STEPS, "threefry")
    assert_same(quiet(clip=clip, workdir=tmp_path).params, first.params)


def _words(value):
    """Returns the name of a test parameter, without arrays in it."""
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """The folder of a run that has shown steps 0 to 4 and stopped while evaluating step 5."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        TestResuming().run(folder, 5, key=KEY)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of a run with a folder that did not stop."""
    return TestResuming().run(tmp_path_factory.mktemp("whole"), key=KEY)


class TestResuming:
    def run(self, folder, stop_at=None, **options):
        """Fits in a folder; the evaluation of step `stop_at` raises."""

        def evaluate(params):
            if len(shown) == stop_at:
                raise KeyboardInterrupt
            shown.append(None)
            return {"norm": optax.tree.norm(params)}

        shown = []
        given = {"eval_every": 1, "checkpoint_every": 2, "evaluate": evaluate, "workdir": folder}
        # Each record is shown before the next step, as if checkpoints were written at once.
        with mock.patch.object(Checkpoints, "saving", return_value=False):
            return quiet(**given | options)

    @pytest.fixture
    def stopped(self, stopped_run, tmp_path):
        return shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)

    def test_noise_key_is_all_that_a_folder_changes(self, whole):
        """The loop by hand with the derived key gives the same parameters."""
        derived = whole.opt_state[0].key
        assert not np.array_equal(*map(jax.random.key_data, (derived, KEY)))
        grad_fn = dpoptax.clipped_grad(linear_loss, 1.0)
        assert_same(whole.params, by_hand(grad_fn, jnp.zeros(5), key=derived))

    def test_stopped_run_ends_with_same_result(self, stopped, whole):
        before = (stopped / "metrics.jsonl").read_text().splitlines()
        log = []
        result = self.run(stopped, log=log)  # the key is not given again
        assert_same(result.params, whole.params)
        after = (stopped / "metrics.jsonl").read_text().splitlines()
        assert [record["step"] for record in log] == list(range(STEPS + 1))
        assert log == result.history == [json.loads(line) for line in after]
        drop = [{**json.loads(line), "seconds": None} for line in before]
        assert drop == [{**record, "seconds": None} for record in log[: len(before)]]
        again = self.run(stopped, 0)
        assert_same(again.params, whole.params)
        assert again.history == result.history

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"key": jax.random.key(4)}, "noise key must be the same as in the first 5 steps"),
            (
                {"plan": make_plan(noise_multiplier=3.0)},
                "`noise_multiplier` must be 2.0, .* got 3.0",
            ),
            ({"plan": make_plan(batch_size=13)}, "`batch_size` must be 12, .* got 13"),
            ({"plan": make_plan(fixed_point=True)}, "`fixed_point` must be False, .* got True"),
            ({"data": (X + 1, Y)}, "training examples must be the same as in the first"),
            ({"microbatch_size": 4}, "`microbatch_size` must be None, .* got 4"),
            ({"loss_fn": lambda p, e: 2 * linear_loss(p, e)}, "`loss_fn`.* must be the same"),
        ],
        ids=_words,
    )
    def test_refuses_to_resume_another_run(self, changes, message, stopped):
        with pytest.raises(ValueError, match=message):
            self.run(stopped, **changes)

    def test_given_gradient_is_part_of_the_run(self, tmp_path):
        given = {"loss_fn": None, "grad_fn": GIVEN_GRADIENT}
        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path, 3, key=KEY, **given)
        other = dpoptax.clipped_grad(lambda p, e: 2 * linear_loss(p, e), 1.0)
        for changed in (
            {"grad_fn": other},
            {"grad_fn": dpoptax.clipped_grad(linear_loss, 0.5)},
            {"grad_fn": dpoptax.clipped_grad(linear_loss, 1.0, microbatch_size=4)},
            {"grad_fn": None, "loss_fn": linear_loss},
        ):
            with pytest.raises(ValueError, match="`grad_fn`, with everything .* must be the same"):
                self.run(tmp_path, **given | changed)
        assert self.run(tmp_path, **given).steps == STEPS

    @pytest.mark.slow
    def test_run_may_be_extended(self, tmp_path, whole):
        self.run(tmp_path, plan=make_plan(steps=3), key=KEY)
        assert_same(self.run(tmp_path).params, whole.params)


def test_folder_gets_the_statement(tmp_path):
    found = quiet(key=KEY, workdir=tmp_path).guarantee
    text = (tmp_path / "statement.txt").read_text("utf-8")
    assert text == found.statement()
    assert "chose them itself" in text


def test_no_step_exceeds_budget():
    plan = make_plan()
    budget = plan.guarantee().epsilon_curve([4], plan.delta)[0] * 1.001
    result = quiet(plan=plan, budget=budget)
    assert result.steps == plan.steps_within(budget) < STEPS
    assert result.guarantee.stated_epsilon <= budget
    assert result.history[-1]["epsilon"] == pytest.approx(result.guarantee.stated_epsilon)
    with pytest.raises(ValueError, match="One step spends ε = .* more than the budget of 0.1"):
        quiet(budget=0.1)


@pytest.mark.slow
def test_logs_to_lists_files_and_functions(tmp_path):
    kept, called, params = [], [], jnp.zeros(5)

    def evaluate(params):
        kept.append(params)
        return {"loss": jnp.float32(1.5), "counts": np.arange(2), "note": "text"}

    options = {"evaluate": evaluate, "eval_every": 4, "params": params}
    result = quiet(log=called.append, **options)
    quiet(log=(logged := []), **options)
    quiet(log=tmp_path / "new" / "log.jsonl", **options)
    text = (tmp_path / "new" / "log.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    for records in (called, logged, written):
        assert [record["step"] for record in records] == [0, 4, 6]
        assert all(record["counts"] == [0, 1] for record in records)
        assert records[-1].keys() == {"step", "epsilon", "loss", "counts", "note", "seconds"}
    assert result.history == called
    # Neither the given arrays nor those of evaluations were donated to a step.
    jax.tree.map(np.asarray, (params, kept))
    assert_same(kept[2], result.params)


def test_evaluate_gets_the_state_of_the_optimizer_and_no_secret():
    shown = []

    def evaluate(params, state):
        shown.append((params, state))
        return {"average": optax.tree.norm(averaging.averaged(params, state))}

    optimizer = optax.chain(ADAM, averaging.average_params(0.5))
    result = quiet(optimizer=optimizer, evaluate=evaluate, eval_every=1)
    average = np.zeros(5)
    for t, (record, (params, state)) in enumerate(zip(result.history, shown, strict=True)):
        kept = min(0.5, t / (9 + t))
        average = kept * average + (1 - kept) * np.asarray(params)
        assert record["average"] == pytest.approx(np.linalg.norm(average), abs=1e-6)
        # The noise key and the ledger are in the other stage of the chain.
        assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))
    assert_same(shown[-1], (result.params, result.opt_state[-1]))
    assert result.history[-1]["average"] != pytest.approx(np.linalg.norm(result.params))


@pytest.mark.slow
def test_long_runs_show_epsilon_in_a_progress_bar(capsys, monkeypatch):
    for patience, shown in ((1e6, False), (0.0, True)):
        monkeypatch.setattr("dpoptax.training.run.training_loop.PATIENCE", patience)
        monkeypatch.setattr("dpoptax.training.run.announcer.PATIENCE", patience or 1e6)
        fit(linear_loss, np.zeros(5), (X, Y), make_plan(), evaluate=lambda params: {"loss": 1.5})
        text = capsys.readouterr().err
        assert ("training: 6/6 steps" in text) == shown
        assert (f"ε ≤ {make_plan().epsilon:.2f}" in text) == shown
        assert ("at 6: loss=1.500" in text) == shown


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (TypeError, {"plan": 3}, "`plan` must be a `dpoptax.PrivacyPlan`, got 3"),
        (TypeError, {"optimizer": 0.1}, "`optimizer` must be an optax transformation, got 0.1"),
        (TypeError, {"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, "gradient_transformation"),
        (TypeError, {"loss_fn": 0.1}, "`loss_fn` must be the loss of one example, got 0.1"),
        (TypeError, {"evaluate": 0.1}, "`evaluate` must be a function of the parameters, got 0.1"),
        (TypeError, {"log": 0.1}, "`log` must be a list, a path or a function, got 0.1"),
        (TypeError, {"clip": "l2"}, "`clip` must be"),
        (TypeError, {"loss_fn": None}, "`loss_fn` must be the loss of one example, got None"),
        (TypeError, {"loss_fn": None, "grad_fn": 3}, "`grad_fn` must be a function .* got 3"),
        (ValueError, {"grad_fn": GIVEN_GRADIENT}, "`loss_fn` must not be given with `grad_fn`"),
        (
            ValueError,
            {"loss_fn": None, "grad_fn": GIVEN_GRADIENT, "microbatch_size": 4},
            "`microbatch_size` must not be given",
        ),
        (
            ValueError,
            {"loss_fn": None, "grad_fn": GIVEN_GRADIENT, "clip": 0.5},
            "`clip` must be that of `grad_fn`, .*1.0.*, got .*0.5",
        ),
        (TypeError, {"params": {"f": jnp.tanh}}, "`params` must be a tree of arrays, got a"),
        (TypeError, {"data": (X, 0.1)}, r"`data\[1\]` must be an array with .* got a float"),
        (TypeError, {"data": (X, 60 * "a")}, r"`data\[1\]` must be an array with .* got a str"),
        (ValueError, {"eval_every": 0}, "`eval_every` must be at least 1, got 0"),
        (ValueError, {"checkpoint_every": 0}, "`checkpoint_every` must be at least 1, got 0"),
        (ValueError, {"data": (X, Y[1:])}, r"`data\[1\]` must have 60 rows, .* got 59"),
        (ValueError, {"data": [X, Y]}, "got 2. A list holds examples: pass .* tuple or dict"),
        (ValueError, {"data": (np.where(X > 2, np.nan, X), Y)}, "`data` must be finite .* of 60"),
        (ValueError, {"data": (X * 1.7e18, Y)}, r"column \[0\] must have numbers below 2⁴⁰"),
        (ValueError, {"mesh": jax.make_mesh((1,), ("x",))}, "`mesh` must have an axis 'data'"),
        (TypeError, {"evaluate": lambda params: 1.5}, "`evaluate` must return a mapping"),
        (ValueError, {"evaluate": lambda params: {"step": 1}}, "must not return .'step'"),
        (TypeError, {"loss_fn": lambda p, e: p}, "scalar"),
    ],
    ids=_words,
)
def test_refuses_bad_arguments_before_first_step(error, changes, message, monkeypatch):
    monkeypatch.setattr(
        training_loop.TrainingLoop, "advance", lambda *_: pytest.fail("a step was taken")
    )
    with pytest.raises(error, match=message):
        quiet(**changes)
