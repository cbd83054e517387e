"""Tests of trainer methods with a custom clip, noise, loss or optimizer, and of their ε."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, auditing, matrix, sampling
from dpoptax.runs import seeded
from dpoptax.training import ConfigError, config_of, task_audit
from dpoptax.training.planning import plan_run, text
from dpoptax.training.run import seeds
from dpoptax.training.run.program import RunProgram
from experiments.augmentations import flipped, shifted
from experiments.config import ExperimentConfig
from experiments.methods import (
    DPSGD,
    AdamBC,
    Augmented,
    AugmentedDisk,
    CorrelatedNoise,
    Disk,
    GeoDP,
    LPAdam,
    NormalizedSteps,
    SignSGD,
)
from tests import runs
from tests.training import resume_test
from tests.training.training_test import run

TINY = config_of(
    ExperimentConfig(model="linear", steps=6, eval_every=3, batch_size=64, accountant="rdp", seed=0)
)
METHODS = {
    "adaptive_clip": {"clip": "adaptive"},
    "correlated_noise": {
        "method": CorrelatedNoise(bands=3, preset="momentum"),
        "sampling": "cyclic",
    },
    "augmented": {"method": Augmented(multiplicity=2)},
    "averaged": {"parameter_ema": 0.5},
    "fixed_point": {"fixed_point": True},
    "chacha20": {"generator": "chacha20"},
    "chacha20_augmented_disk": {
        "generator": "chacha20",
        "method": AugmentedDisk(multiplicity=2, mirrored=True, flip=True),
    },
    "correlated_fixed_point": {
        "method": CorrelatedNoise(bands=3),
        "sampling": "cyclic",
        "fixed_point": True,
    },
    "adam_bc": {"method": AdamBC()},
    "lp_adam": {"method": LPAdam()},
}
# Each part of a release once: clip, sampler with correlation and rounding, and generator with
# points and loss. The others repeat a part or change the update after the noise.
RELEASES = ("adaptive_clip", "correlated_fixed_point", "chacha20_augmented_disk")
VARIATIONS = sorted(METHODS.keys() - set(RELEASES))


def tiny(**changes):
    changes.pop("generator", None)
    return TINY.replace(**changes)


def chain_of(config, key=None):
    """Returns the whole chain of a config."""
    return RunProgram(config.task(), **({} if key is None else {"key": key})).chain()


def check_resuming(name, folder):
    """Checks that a stopped run ends with the same parameters, and with the planned ε."""
    changes = {**METHODS[name], "batch_size": 64}
    whole = resume_test.run(folder / "whole", **changes)
    with pytest.raises(resume_test.StoppedError):
        resume_test.run(folder / "stopped", stop_before=4, **changes)
    again = resume_test.run(folder / "stopped", **changes)
    assert again["params_sha256"] == whole["params_sha256"]
    changes.pop("generator", None)
    assert again["epsilon"] == whole["epsilon"] == runs.CONFIG.task(**changes).plan.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASES)
def test_stopped_run_resumes_exactly_and_spends_planned_epsilon(name, tmp_path):
    check_resuming(name, tmp_path)


@pytest.mark.slow
@pytest.mark.spread(2)
@pytest.mark.parametrize("name", VARIATIONS)
def test_stopped_run_of_variation_resumes_exactly(name, tmp_path):
    check_resuming(name, tmp_path)


DP_SGD = sorted(METHODS.keys() - {"correlated_noise", "correlated_fixed_point"})


@pytest.mark.parametrize("name", DP_SGD)
def test_methods_need_same_noise_as_dp_sgd(name):
    plan, of_dp_sgd = tiny(**METHODS[name]).task().plan, TINY.task().plan
    assert plan.noise_multiplier == of_dp_sgd.noise_multiplier
    assert plan.epsilon == of_dp_sgd.epsilon


def test_uses_fixed_point_noise_only_on_request():
    for fixed_point in (False, True):
        made = chain_of(tiny(fixed_point=fixed_point, noise_multiplier=2.0))
        (ledger,) = dpoptax.ledgers(made.init(jnp.zeros(3)))
        assert ledger.mechanism.fixed_point is fixed_point


def test_prices_correlated_noise_with_sampler_and_steps(tmp_path):
    config = tiny(**METHODS["correlated_noise"])
    changes = {**METHODS["correlated_noise"], "batch_size": 64}
    changes |= {"epsilon": 3.0, "noise_multiplier": None}
    summary = resume_test.run(tmp_path, **changes)
    sampler = matrix.CyclicPoissonSampler(1438, 64, seed=7, cycle_length=3)
    strategy = matrix.optimal_banded_toeplitz(6, 3)
    release = {"noise_multiplier": summary["noise_multiplier"], "delta": 1e-5, "accountant": "rdp"}
    want = accounting.planned_guarantee(
        **release, steps=6, sampler=strategy.under(sampler)
    ).stated_epsilon
    assert summary["epsilon"] == pytest.approx(want)
    assert 0.99 * 3.0 < want <= 3.0
    # Two rounds with probability 3B/N each need more noise than six with B/N.
    assert summary["noise_multiplier"] > 1.1 * TINY.task().plan.noise_multiplier
    assert (summary["sampling"], summary["cycle_length"]) == ("CyclicPoissonSampler", 3)
    said = text("run", plan_run(config.task(), count_flops=False))
    assert "drawn by CyclicPoissonSampler" in said
    given = {"noise_multiplier": summary["noise_multiplier"], "epsilon": None, "steps": 12}
    with pytest.raises(ValueError, match=r"^`(strategy|steps)`.* must be"):
        resume_test.run(tmp_path, **changes | given)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_refuses_correlated_noise_with_other_sampling(sampling):
    config = tiny(**{**METHODS["correlated_noise"], "sampling": sampling})
    with pytest.raises(ValueError, match=r"could take part in successive steps"):
        config.task()


@pytest.mark.parametrize("method", [DPSGD(), CorrelatedNoise(bands=22)])
def test_in_order_batches_are_whole_groups_and_unamplified(method):
    # 22 batches of 64 form an epoch of 1,438, so each example is in at most two of these 30.
    config = tiny(method=method, sampling="in_order", steps=30, noise_multiplier=4.0, epsilon=None)
    plan = config.task().plan
    sampler = dataclasses.replace(plan.sampler, seed=0)
    drawn = [int(i) for s in sampler.samples(0, 22) for i in s.indices[s.mask]]
    assert len(drawn) == len(set(drawn)) == 22 * 64
    alone = dataclasses.replace(plan, steps=22).epsilon
    assert alone == pytest.approx(
        accounting.planned_guarantee(
            noise_multiplier=4.0,
            steps=1,
            sampler=sampling.PoissonSampler(64, 64, seed=0),
            accountant="rdp",
        ).epsilon(1e-5)
    )
    assert plan.epsilon > alone


@pytest.mark.slow
def test_augmented_step_averages_copies_before_clipping(no_room):
    config = tiny(
        method=Augmented(multiplicity=3, shift=1),
        steps=1,
        noise_multiplier=0.0,
        epsilon=None,
        l2_clip_norm=0.5,
    )
    result, task = run(config), config.task()
    got, params = result.params, task.params
    key = seeds.key_of(0, "threefry")
    indices, mask = seeded(task.plan.sampler, key).sample(0)
    batch = jax.tree.map(lambda x: x[indices], task.data)
    augment, loss = shifted(1), TINY.task().loss_fn
    step_key = jax.random.fold_in(seeds.random_key(key), 0)

    @jax.jit
    @jax.vmap
    def clipped(example, index):
        keys = jax.random.split(jax.random.fold_in(step_key, index), 3)
        grads = [jax.grad(loss)(params, augment(example, key)) for key in keys]
        mean = jax.tree.map(lambda *g: sum(g) / 3, *grads)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(mean)))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), mean)

    each = clipped(batch, jnp.asarray(indices))
    want = jax.tree.map(lambda p, g: p - jnp.tensordot(mask * 1.0, g, 1) / 64, params, each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.slow
def test_augmented_disk_on_identical_copies_is_disk(no_room):
    config = tiny(method=Disk(), noise_multiplier=1.0, epsilon=None)
    want = run(config).params
    same = AugmentedDisk(multiplicity=2, shift=0)
    got = run(config.replace(method=same)).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    other = run(config.replace(method=AugmentedDisk(multiplicity=2))).params
    assert max(map(float, jax.tree.leaves(jax.tree.map(_distance, other, want)))) > 1e-3
    state = chain_of(config.replace(method=same)).init(want)
    assert len(dpoptax.gradient_points(state, want).points) == 2


def _distance(a, b):
    return jnp.max(jnp.abs(a - b))


def test_every_step_has_a_different_key():
    def fed(config):
        program = RunProgram(config.task())
        return program.feed(program.chain().init(program.task.params))

    inputs = map(fed(tiny(**METHODS["augmented"])), range(4))
    assert len({tuple(jax.random.key_data(each.key).tolist()) for each in inputs}) == 4
    assert fed(TINY)(0).key is None


@pytest.mark.slow
def test_shifts_are_uniform_and_pad_with_zeros():
    image = np.arange(1.0, 13.0).reshape(3, 4, 1)
    example = {"inputs": jnp.asarray(image), "labels": 3}
    moved = jax.jit(jax.vmap(lambda key: shifted(1)(example, key)["inputs"]))(
        jax.random.split(jax.random.key(0), 900)
    )
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    windows = [padded[i : i + 3, j : j + 4] for i in range(3) for j in range(3)]
    counts = [int(np.sum(np.all(np.asarray(moved) == w, axis=(1, 2, 3)))) for w in windows]
    assert sum(counts) == 900
    assert min(counts) > 60
    mirrored = jax.jit(jax.vmap(lambda key: shifted(1, mirrored=True)(example, key)["inputs"]))(
        jax.random.split(jax.random.key(0), 100)
    )
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), "edge")  # for one pixel the same as mirroring
    windows = [padded[i : i + 3, j : j + 4] for i in range(3) for j in range(3)]
    found = {i for i, w in enumerate(windows) for m in np.asarray(mirrored) if np.all(m == w)}
    assert found == set(range(9))
    assert all(any(np.all(m == w) for w in windows) for m in np.asarray(mirrored))
    with pytest.raises(ConfigError, match="`shift` must be a nonnegative integer, got -1"):
        shifted(-1)
    with pytest.raises(ConfigError, match=r"must be images .* got shape \(5,\)"):
        shifted(1)({"inputs": jnp.zeros(5)}, jax.random.key(0))


@pytest.mark.slow
def test_flips_half_of_the_copies_horizontally():
    image = np.arange(1.0, 13.0).reshape(3, 4, 1)
    example = {"inputs": jnp.asarray(image), "labels": 3}
    augment = flipped(shifted(0))
    made = jax.jit(jax.vmap(lambda key: augment(example, key)["inputs"]))(
        jax.random.split(jax.random.key(0), 400)
    )
    as_it_was = np.all(np.asarray(made) == image, axis=(1, 2, 3))
    turned = np.all(np.asarray(made) == image[:, ::-1], axis=(1, 2, 3))
    assert np.all(as_it_was ^ turned)
    assert 150 < as_it_was.sum() < 250
    assert augment(example, jax.random.key(0))["labels"] == 3


@pytest.fixture
def short_search(monkeypatch):
    """Shortens the search for the worst example, which tests of clips run in full."""
    short = functools.partial(auditing.searched_canary, starts=7, steps=5)
    monkeypatch.setattr(auditing, "searched_canary", short)


def check_audit(name):
    rows = task_audit.audit_task(tiny(**METHODS[name]).task(), trials=640)
    assert len(rows) == 4
    assert rows[1].name == "one full-batch release, worst example found"
    assert not any(row.violated for row in rows)
    # With so few trials, the attack on one release proves a fraction of the claim.
    assert rows[0].result.epsilon_lower_bound > 0.1 * rows[0].result.claimed_epsilon


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASES[:-1])
def test_audit_does_not_contradict_claim(name, short_search):
    check_audit(name)


@pytest.mark.slow
@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [*VARIATIONS, RELEASES[-1]])
def test_audit_of_variation_does_not_contradict_claim(name, short_search):
    check_audit(name)


def test_refuses_audit_without_claim():
    config = tiny(method=GeoDP(), noise_multiplier=1.0, epsilon=None)
    with pytest.raises(
        ConfigError, match=r"privacy proof .* got GeoDP: .*turn a small mean gradient around"
    ):
        task_audit.audit_task(config.task())


@pytest.mark.parametrize(
    ("method", "behind"),
    [
        (
            AdamBC(),
            lambda s: dpoptax.extend.scale_by_lp_adam((0.1,), (-0.9,), stddev=s),
        ),
        pytest.param(
            NormalizedSteps(),
            lambda s: optax.normalize_by_update_norm(),
            marks=pytest.mark.slow,
        ),
        (SignSGD(), lambda s: optax.stateless(lambda g, _: jax.tree.map(jnp.sign, g))),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_directions_follow_noise_and_use_its_stddev(method, behind):
    config = tiny(method=method, noise_multiplier=2.0, epsilon=None, learning_rate=0.5)
    params = {"kernel": jnp.zeros((6, 9)), "bias": jnp.zeros(4)}
    trainer = chain_of(config, jax.random.key(0))
    noise = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=64, key=jax.random.key(0))
    by_hand = optax.chain(noise, behind(2.0 * 1.0 / 64), optax.scale(-0.5))
    states = trainer.init(params), by_hand.init(params)
    for step in range(3):
        total = jax.tree.map(
            lambda p, t=step: jnp.sin(jnp.arange(p.size) + t).reshape(p.shape), params
        )
        clipped = dpoptax.extend.trust_clipped(total, dpoptax.l2_clip(1.0))
        got, first = trainer.update(clipped, states[0], params)
        want, second = by_hand.update(clipped, states[1], params)
        states = first, second
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
