"""Tests that a run hands out its noise and batches once, and continues from its state alone."""

import copy
import dataclasses
import functools
import itertools
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling
from dpoptax._support.fingerprints import key_fingerprint, seed_fingerprint
from tests.helpers import after_releases

pytestmark = pytest.mark.usefixtures("coarse_prices")

SIZES = {"dataset_size": 200, "batch_size": 20, "steps": 6}
X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
KEY, CHACHA20 = jax.random.key(3), jnp.arange(8, dtype=jnp.uint32)
CYCLIC = functools.partial(matrix.CyclicPoissonSampler, cycle_length=2)
CORRELATED = {"strategy": matrix.BandedToeplitz((1.0, 0.5)), "sampler": CYCLIC}
ADAPTIVE = dpoptax.contrib.adaptive_clip(1.0)
RUNS = {  # options of the plan, the key and the clip
    "threefry": ({}, KEY, None),
    "chacha20": ({}, CHACHA20, None),
    "correlated": (CORRELATED, KEY, None),
    "schedule": ({"noise_multiplier": {0: 4.0, 4: 2.0}}, KEY, None),
    "adaptive clip": ({}, KEY, ADAPTIVE),
    "fixed point": ({"fixed_point": True}, CHACHA20, None),
    "correlated, fixed point": (CORRELATED | {"fixed_point": True}, KEY, dpoptax.l2_clip(1.0)),
    "random allocation": (
        {"sampler": sampling.RandomAllocationSampler, "accountant": "pld"},
        KEY,
        None,
    ),
}


def plan_of(**options):
    return dpoptax.PrivacyPlan(**SIZES | {"noise_multiplier": 2.0, "accountant": "rdp"} | options)


def state_of(run, steps):
    return after_releases(run.noise(), jnp.zeros(3), steps)


def drawn(items):
    """Returns the steps and the records of batches or draws."""
    found = []
    for item in items:
        if isinstance(item, dpoptax.Batch):
            item = item.step, item.ids, item.mask
        step, indices, mask = item
        found.append((step, tuple(np.sort(np.asarray(indices)[np.asarray(mask)]).tolist())))
    return found


class Loop:
    """A loop written by hand, for a run, with parameters and the state of its chain."""

    def __init__(self, run, clip=None):
        self.noise = run.noise(clip=clip)
        self.tx = optax.chain(self.noise, optax.sgd(0.3, momentum=0.5))
        self.clip = dpoptax.l2_clip(1.0) if clip is None else clip
        self.grad_fn = dpoptax.clipped_grad(
            lambda w, x: jnp.sum((w - x) ** 2), self.clip, grid=run.plan.grid(self.clip)
        )
        self.params = jnp.zeros(3)
        self.state = self.tx.init(self.params)

    def update(self, rows, mask):
        """Takes a step. For an adaptive clip, with the sum that it makes for this state."""
        points = dpoptax.gradient_points(self.state, self.params)
        updates, self.state = self.tx.update(
            self.grad_fn(points, rows, mask), self.state, self.params
        )
        self.params = optax.apply_updates(self.params, updates)

    def take(self, batches):
        for batch in batches:
            self.update(batch.examples, batch.mask)
        return self


@pytest.mark.parametrize("name", RUNS)
def test_continued_run_equals_the_uninterrupted_run(name):
    options, key, clip = RUNS[name]
    plan = plan_of(**options)
    run = plan.new_run(key)
    whole = Loop(run, clip).take(run.batches(X))

    first = plan.new_run(key)
    part = Loop(first, clip).take(itertools.islice(first.batches(X), 4))
    again = plan.continue_run(part.state)
    assert again.step == 4
    resumed = Loop(again, clip)
    resumed.params, resumed.state = part.params, part.state
    resumed.take(again.batches(X))
    for one, two in zip(
        jax.tree.leaves((whole.params, whole.state)),
        jax.tree.leaves((resumed.params, resumed.state)),
        strict=True,
    ):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        np.testing.assert_array_equal(one, two)
    assert again.guarantee(resumed.state).event == run.guarantee(whole.state).event
    assert (
        run.guarantee(whole.state).event
        == first.plan.continue_run(whole.state).guarantee(resumed.state).event
    )


def test_state_of_another_chain_continues_in_a_chain_that_is_made_again():
    """A script makes its chain before it restores a state, so that of an unused run."""
    plan = plan_of()
    run = plan.new_run(KEY)
    whole = Loop(run).take(run.batches(X))
    first = plan.new_run(KEY)
    part = Loop(first).take(itertools.islice(first.batches(X), 2))
    resumed = Loop(plan.new_run())
    resumed.params, resumed.state = part.params, part.state
    resumed.take(plan.continue_run(part.state).batches(X))
    np.testing.assert_array_equal(resumed.params, whole.params)


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 2.5},
        {"noise_multiplier": {0: 2.0, 3: 1.0}},
        {"batch_size": 21},
        {"fixed_point": True},
        CORRELATED,
        {"dataset_size": 400},
        {"sampler": sampling.FixedSizeSampler},
        {"sampler": functools.partial(sampling.PoissonSampler, max_batch_size=30)},
    ],
    ids=lambda change: "-".join(change),
)
def test_state_continues_under_its_own_plan_only(change):
    state = state_of(plan_of().new_run(), 2)
    with pytest.raises(ValueError, match="must have the noise of the plan"):
        plan_of(**change).continue_run(state)
    with pytest.raises(ValueError, match="must have the noise of the plan"):
        plan_of().continue_run(state_of(plan_of(**change).new_run(), 2))


@pytest.mark.parametrize("name", RUNS)
def test_state_has_the_price_of_its_own_sampler_only(name):
    """A state of 200 records stated 0.05 instead of 0.79 with a sampler of 2,000."""
    options, key, clip = RUNS[name]
    run = plan_of(**options).new_run(key)
    noise = run.noise(clip=clip)
    for dataset_size in (200, 2000):
        sampler = dataclasses.replace(run.plan.sampler, dataset_size=dataset_size, multiple_of=8)
        for state in (noise.init(jnp.zeros(3)), restored(noise, plan_of(**options), clip)):
            if dataset_size == 200:
                assert accounting.guarantee(state, sampler, delta=1e-5).releases[0].number == 0
                continue
            with pytest.raises(ValueError, match=r"`sampler` must be that of the noise stage"):
                accounting.guarantee(state, sampler, delta=1e-5)


def restored(noise, plan, clip):
    """Returns a state that was stored and restored into the chain of another start."""
    state, like = (tx.init(jnp.zeros(3)) for tx in (noise, plan.new_run().noise(clip=clip)))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state))


def test_state_restored_into_a_chain_of_another_sampler_is_refused():
    """Its arrays hold the sampler, because the structure is that of the new chain."""
    state = restored(plan_of().new_run().noise(), plan_of(dataset_size=400), None)
    for read in (dpoptax.ledgers, plan_of(dataset_size=400).continue_run):
        with pytest.raises(ValueError, match="schedule, strategy, sampler or kind of noise"):
            read(state)


def test_state_of_several_stages_is_not_one_run():
    plan = plan_of()
    states = [state_of(plan.new_run(), 2) for _ in range(2)]
    with pytest.raises(ValueError, match="must have one noise stage, got 2"):
        plan.continue_run(states)
    with pytest.raises(ValueError, match="ledger"):
        plan.continue_run(optax.sgd(0.1, momentum=0.5).init(jnp.zeros(3)))


def test_later_plan_of_more_steps_continues_the_run():
    plan, longer = plan_of(), plan_of(steps=9)
    run, whole = plan.new_run(KEY), longer.new_run(KEY)
    state = state_of(run, 6)
    assert drawn(run.batches(X)) + drawn(longer.continue_run(state).batches(X)) == drawn(
        whole.batches(X)
    )


class TestOneUse:
    """A run has one noise stage, one pass over its batches, and the state of its own noise."""

    def test_noise_that_was_refused_may_be_made_again(self):
        run = plan_of(**CORRELATED, fixed_point=True).new_run()
        with pytest.raises(ValueError, match="`clip` must be the clip of all sums"):
            run.noise()
        run.noise(clip=1.0)

    @pytest.mark.parametrize("ways", list(itertools.product(["batches", "draws"], repeat=2)))
    def test_second_pass_is_refused(self, ways):
        run = plan_of().new_run()
        first, second = ({"batches": lambda: run.batches(X), "draws": run.draws}[w] for w in ways)
        assert [step for step, _ in drawn(first())] == list(range(6))
        with pytest.raises(ValueError, match="All 6 batches of the run were handed out"):
            second()

    def test_iterator_of_a_finished_run_is_empty(self):
        run = plan_of().new_run()
        first, second = run.batches(X), run.batches(X)
        assert len(list(first)) == 6
        assert list(second) == []

    @pytest.mark.parametrize("epochs", [(2, 2, 2), (1, 5), (3, 0, 2, 1)])
    def test_passes_continue(self, epochs):
        """`islice` of six epochs took the same batches six times from a plan with a seed."""
        plan = plan_of()
        run, whole = plan.new_run(KEY), plan.new_run(KEY)
        found = [drawn(itertools.islice(run.batches(X), steps)) for steps in epochs]
        assert sum(found, []) == drawn(whole.batches(X))
        assert run.step == 6

    def test_two_iterators_are_refused(self):
        run = plan_of().new_run()
        first, second = run.batches(X), run.draws()
        assert next(first).step == 0
        assert next(second)[0] == 1
        with pytest.raises(RuntimeError, match="must be taken from one iterator"):
            next(first)
        assert next(second)[0] == 2

    @pytest.mark.parametrize(
        ("sampler", "most"),
        [(sampling.RandomAllocationSampler, 1), (CYCLIC, 4)],
        ids=["random allocation", "cyclic"],
    )
    def test_restarted_loop_lets_no_record_take_part_too_often(self, sampler, most):
        """A new pass after each step drew groups and places anew: 7.59 was stated, 11.4 true."""
        plan = dpoptax.PrivacyPlan(
            dataset_size=200, batch_size=20, steps=8, noise_multiplier=2.0, sampler=sampler
        )
        run, times, groups = plan.new_run(), np.zeros(200, int), np.zeros((2, 200), bool)
        for step in range(8):
            for batch in itertools.islice(run.batches(X), 1):
                ids = batch.ids[batch.mask]
                times[ids] += 1
                groups[step % 2, ids] = True
        assert times.max() <= most
        assert times.sum() > 100
        if sampler is CYCLIC:
            assert not groups.all(0).any()  # a record has one group


class TestStates:
    """`guarantee` is that of a state which counts one release for each batch."""

    def test_draws_of_one_run_belong_to_one_training(self):
        """Two trainings on one run's draws stated 1.17 where 3.88 is true."""
        run = plan_of().new_run()
        draws, tx = list(run.draws()), run.noise()
        with pytest.raises(RuntimeError, match="`noise` of a run must be called once"):
            run.noise()  # a notebook's cell that runs twice
        with pytest.raises(ValueError, match="All 6 batches of the run were handed out"):
            run.draws()
        other = plan_of().new_run()
        fresh = state_of(other, len(draws))
        with pytest.raises(ValueError, match="must hold the noise of this run only"):
            run.guarantee(fresh)
        with pytest.raises(ValueError, match="counts 6 releases, but the run has handed out 0"):
            other.guarantee(fresh)
        run.guarantee(after_releases(tx, jnp.zeros(3), 6))
        with pytest.raises(RuntimeError, match="`init` must not be called again"):
            tx.init(jnp.zeros(3))  # only the training's cell runs twice, with another loss

    def test_guarantee_follows_the_loop(self):
        run = plan_of().new_run(KEY)
        loop = Loop(run)
        spent = [run.guarantee(loop.state).stated_epsilon]
        for batch in run.batches(X):
            before = run.guarantee(loop.state).stated_epsilon  # between batch and release
            assert before == spent[-1]
            loop.update(batch.examples, batch.mask)
            spent.append(run.guarantee(loop.state).stated_epsilon)
        assert spent[0] == 0
        assert all(np.diff(spent) > 0)
        assert spent[-1] == run.plan.epsilon

    def test_loop_that_ends_early_has_a_guarantee(self):
        run = plan_of().new_run()
        loop = Loop(run)
        for batch in run.batches(X):
            if batch.step == 3:
                break
            loop.update(batch.examples, batch.mask)
        assert run.guarantee(loop.state).releases[0].number == 3

    def test_state_of_another_run_is_refused(self):
        plan = plan_of()
        run, other = plan.new_run(), plan.new_run()
        loop = Loop(other).take(other.batches(X))
        list(run.draws())
        for state in (loop.state, [loop.state, run.noise().init(jnp.zeros(3))]):
            with pytest.raises(ValueError, match="must hold the noise of this run only"):
                run.guarantee(state)

    def test_states_may_be_made_before_the_first_batch(self):
        run = plan_of().new_run()
        loop = Loop(run)
        loop.state = loop.tx.init(loop.params)
        loop.take(run.batches(X))
        for read in (jax.eval_shape, lambda init, params: jax.jit(init).lower(params)):
            read(loop.tx.init, loop.params)  # the structure of a checkpoint
        assert run.guarantee(loop.state).releases[0].number == 6
        again = run.plan.continue_run(loop.state)
        assert again.noise().init(jnp.zeros(3)).count == 0  # also a structure

    @pytest.mark.parametrize("before", [1, 2, 5])
    def test_state_that_starts_again_is_refused(self, before):
        run = plan_of().new_run()
        loop, batches = Loop(run), run.batches(X)
        first = loop.state
        loop.take(itertools.islice(batches, before))
        with pytest.raises(RuntimeError, match="`init` must not be called again"):
            loop.tx.init(loop.params)
        loop.state = first  # has the same noise from step 0
        loop.take(batches)
        with pytest.raises(ValueError, match=f"counts {6 - before} .*handed out 6 batches"):
            run.guarantee(loop.state)

    def test_batch_that_is_used_twice_is_refused(self):
        run = plan_of().new_run()
        loop = Loop(run)
        for batch in itertools.islice(run.batches(X), 3):
            loop.update(batch.examples, batch.mask)
        loop.update(batch.examples, batch.mask)
        with pytest.raises(ValueError, match="counts 4 releases, but .* handed out 3 batches"):
            run.guarantee(loop.state)

    def test_batch_that_is_skipped_is_refused(self):
        """A restored run would draw the batches before the skipped one again."""
        run = plan_of().new_run()
        next(run.batches(X))  # to look at it
        loop = Loop(run).take(run.batches(X))
        with pytest.raises(ValueError, match="counts 5 .*To look at a batch, take one of another"):
            run.guarantee(loop.state)


class TestSecrets:
    """The noise key is the only secret, and the seed is a hash of it."""

    def test_each_run_has_its_own(self):
        plan = plan_of()
        runs = [plan.new_run() for _ in range(3)] + [plan.new_run(generator="chacha20")]
        assert len({tuple(drawn(run.draws())) for run in runs}) == 4
        assert plan.sampler.seed is None
        assert len({run._fingerprint for run in runs}) == 4

    def test_key_comes_from_the_operating_system(self, monkeypatch):
        asked = []
        monkeypatch.setattr(
            "secrets.token_bytes", lambda size: asked.append(size) or os.urandom(size)
        )
        plan_of().new_run()
        plan_of().new_run(generator="chacha20")
        assert asked == [8, 32]
        with pytest.raises(ValueError, match="`generator` must be one of"):
            plan_of().new_run(generator="mt19937")

    @pytest.mark.parametrize("key", [KEY, CHACHA20], ids=["threefry", "chacha20"])
    def test_key_repeats_the_run(self, key):
        plan = plan_of()
        one, two = plan.new_run(key), plan.new_run(key)
        assert drawn(one.draws()) == drawn(two.draws())
        other = jnp.flip(key) if key is CHACHA20 else jax.random.key(4)
        assert drawn(plan.new_run(key).draws()) != drawn(plan.new_run(other).draws())

    def test_batches_are_as_strong_as_the_noise(self):
        for key, random in ((KEY, ("threefry", "PCG64")), (CHACHA20, ("chacha20", "SHAKE-256"))):
            run = plan_of().new_run(key)
            list(run.draws())
            assert run._sampler.generator == random[1]
            text = str(run.guarantee(state_of(run, 6)))
            assert f"noise by {random[0]}" in text.lower()
            assert random[1] in text

    def test_nothing_shows_key_or_seed(self):
        run = plan_of().new_run(jax.random.key(271828182))
        list(run.draws())
        seed = run._sampler.seed
        assert seed >= 2**100
        made = run.guarantee(state_of(run, 6))
        assert made.event.seeds == {seed_fingerprint(seed)}
        (key,) = made.event.keys
        assert key == key_fingerprint(np.asarray([0, 271828182], np.uint32).tobytes())
        for text in (repr(run), str(run), repr(made), str(made), str(made.to_dict())):
            assert not any(part in text for part in (str(seed), "271828182", key))

    def test_bad_key_is_refused(self):
        with pytest.raises(TypeError, match="`key` must be a random key, not a seed"):
            plan_of().new_run(0)

    @pytest.mark.parametrize("key", [KEY, CHACHA20], ids=["threefry", "chacha20"])
    def test_key_of_an_event_of_also_is_refused(self, key):
        run = plan_of().new_run(key)
        list(run.draws())
        spent = run.guarantee(state_of(run, 6))
        later = plan_of(also=[spent])
        for name in ("keys", "seeds"):
            event = accounting.PrivacyEvent(
                spent.event.dp_event, **{name: getattr(spent.event, name)}
            )
            with pytest.raises(ValueError, match="must not have the same (noise key|sampler seed)"):
                plan_of(also=[event]).new_run(key)
        with pytest.raises(ValueError, match="must not have the same noise key"):
            later.new_run(key)
        with pytest.raises(ValueError, match="must not have the same noise key"):
            later.continue_run(state_of(plan_of().new_run(key), 1))
        fresh = later.new_run()
        list(fresh.draws())
        both = fresh.guarantee(state_of(fresh, 6))
        assert both.event.keys == {run._fingerprint, fresh._fingerprint}
        assert both.stated_epsilon == pytest.approx(later.epsilon)

    @pytest.mark.parametrize("generator", ["threefry", "chacha20"])
    def test_run_is_not_copied(self, generator):
        """Workers that got one run by pickle added the same noise to their sums."""
        run = plan_of().new_run(generator=generator)
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="A run must not be copied or pickled"):
                way(run)

    def test_copies_of_a_run_compose_to_nothing(self):
        run = plan_of().new_run()
        other = pickle.loads(pickle.dumps(run.plan)).new_run(run._key)
        list(run.draws()), list(other.draws())
        found = [each.guarantee(state_of(each, 6)) for each in (run, other)]
        with pytest.raises(ValueError, match="must not have the same noise key"):
            accounting.selection.all_of(found)


def test_plan_says_where_a_run_is():
    for name in ("noise", "batches", "draws"):
        with pytest.raises(AttributeError, match=f"run = plan.new_run.*run.{name}"):
            getattr(plan_of(), name)
    with pytest.raises(AttributeError, match="no attribute 'epsilons'$"):
        plan_of().epsilons  # noqa: B018


def test_seeded_sampler_is_refused():
    seeded = sampling.PoissonSampler(200, 20, seed=0)
    for sampler in (seeded, functools.partial(sampling.PoissonSampler, seed=b"\1" * 32)):
        with pytest.raises(ValueError, match="`sampler` must have no seed"):
            plan_of(sampler=sampler)
    with pytest.raises(TypeError, match="seed"):
        plan_of(seed=0)
