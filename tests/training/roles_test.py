"""Tests of field roles in configs, and that equal chains are one program."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
from dpoptax.training.methods import Disk
from dpoptax.training.roles import Role, role_of
from dpoptax.training.run.chain import build_chain
from dpoptax.training.run.resolved import build_step

import dpoptax
from dpoptax import matrix
from dpoptax.training import TrainConfig, methods, models
from dpoptax.training.run.feeding import Resident
from dpoptax.training.run.seeds import Keys
from dpoptax.training.search import settings
from experiments.methods import GeoDP


def test_only_listed_fields_may_change_on_resuming():
    free = {
        each.name for each in dataclasses.fields(TrainConfig) if Role.CHANGEABLE in role_of(each)
    }
    planned = {"batch_size", "noise_multiplier", "sampling", "seed"}
    files = {"data_dir", "checkpoint_every", "eval_every"}
    assert free == {*planned, *files, "steps", "epsilon", "accountant", "parallel"}


def test_method_fields_that_affect_release_are_priced():
    # Only these fields of the shipped methods may be drawn from a range without changing the price.
    # They affect gradient points, filters and other post-processing, or a method without ε.
    unpriced = {
        each.name
        for method in vars(methods).values()
        if inspect.isclass(method)
        for each in dataclasses.fields(method)
        if Role.UNPRICED in role_of(each)
    }
    assert unpriced == {"kappa", "gamma", "filter_gain", "beta", "preset"}


def test_range_requires_unpriced_field_in_every_config():
    @dataclasses.dataclass(frozen=True)
    class Own(Disk):
        kappa: float = 0.7  # without a role, the field counts as priced

    ranged = ("method.kappa=uniform:0.1:0.9",)
    (one,) = settings.representatives({"disk": TrainConfig(method=Disk())}, ranged)
    assert 0.1 < one.config.method.kappa < 0.9
    with pytest.raises(settings.ConfigError, match="`method.kappa` must not be drawn"):
        settings.representatives(
            {"a": TrainConfig(method=Disk()), "b": TrainConfig(method=Own())}, ranged
        )


def _traced(config, key):
    """Returns the program of a step, including arrays that would be compiled in."""
    chain = build_chain(config, 1.0, Keys.of(jax.random.key(key)))
    model = config.build_model(10)
    inputs = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
    start = functools.partial(models.initial_variables, model)
    params, frozen = jax.eval_shape(start, inputs, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    split = {"inputs": jax.ShapeDtypeStruct((9, 8, 8, 1), jnp.float32)}
    batch = Resident({**split, "labels": jax.ShapeDtypeStruct((9,), jnp.int32)}, rows, rows)
    mask = jax.ShapeDtypeStruct((4,), jnp.bool_)
    state = jax.eval_shape(chain.optimizer.init, params)
    arguments = (params, state, batch, mask, frozen)
    return chain, jax.jit(build_step(chain, model)).lower(*arguments).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", [methods.DPSGD(), methods.AdaptiveKalman(), methods.LPAdam()])
def test_equal_chains_share_one_program(method):
    config = TrainConfig(method=method, model="linear", batch_size=4)
    config = dataclasses.replace(config, noise_multiplier=1.0, parameter_ema=0.9)
    first, program = _traced(config, 0)
    other = dataclasses.replace(config, learning_rate=0.25, seed=3)
    second, same = _traced(other, 1)
    assert (first, hash(first), program) == (second, hash(second), same)
    third, different = _traced(dataclasses.replace(config, l2_clip_norm=0.5), 0)
    assert first != third
    assert program != different


def test_chain_depends_on_neither_learning_rate_nor_seed():
    config = TrainConfig(noise_multiplier=1.0, learning_rate=0.25, seed=3)
    chain = build_chain(config, 1.0, Keys.of(jax.random.key(0)))
    assert (chain.config.learning_rate, chain.config.seed, chain.learning_rate) == (1.0, None, 0.25)


def test_method_and_ledger_agree_on_missing_proof():
    geodp, key = GeoDP(), jax.random.key(0)
    noise = geodp.noise(None, 1, noise_multiplier=1.0, batch_size=1, key=key)
    (ledger,) = dpoptax.ledgers(noise.init({}))
    assert geodp.unproven() == ledger.mechanism.unproven


class Silent(GeoDP):
    def unproven(self):
        return None


class Halved(methods.DPSGD):
    def noise(self, clip, steps, **release):
        return super().noise(clip, steps, **{**release, "noise_multiplier": 0.5})


class AdaptiveAndCorrelated(methods.AdaptiveClip):
    def strategy(self, steps):
        return matrix.BandedToeplitz((1.0, 0.5))


def test_refuses_adaptive_method_with_strategy():
    """Independent noise would be priced as correlated noise."""
    with pytest.raises(settings.ConfigError, match="must not be adaptive with correlated noise"):
        build_chain(TrainConfig(method=AdaptiveAndCorrelated()), 1.0, Keys.of(jax.random.key(0)))


@pytest.mark.parametrize("method", [Halved(), Silent()], ids=["halved", "silent"])
def test_refuses_method_with_unexplained_noise(method):
    """Neither the budget nor the shown ε would describe this noise."""
    with pytest.raises(settings.ConfigError, match=f"Remove {type(method).__name__}.noise"):
        build_chain(TrainConfig(method=method), 1.0, Keys.of(jax.random.key(0)))
