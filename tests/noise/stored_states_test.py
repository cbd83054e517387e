"""Tests that states of every released version are read and continued."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import serialization

import dpoptax
from dpoptax import matrix
from dpoptax._release.ledger import Mechanism
from tests.noise.stored_states import CHAINS, FOLDER, PARAMS, STEPS, train

FILES = sorted(FOLDER.glob("*/*.msgpack"))


def test_every_chain_is_stored():
    assert {file.stem for file in FILES} == set(CHAINS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_stored_state_continues(file):
    tx = CHAINS[file.stem]()
    target = {"params": PARAMS, "state": tx.init(PARAMS), "later": PARAMS}
    stored = serialization.from_bytes(target, file.read_bytes())
    (ledger,) = dpoptax.ledgers(stored["state"])
    assert ledger.releases == STEPS
    steps = range(STEPS, STEPS + 2)
    later, state = train(tx, file.stem, stored["params"], stored["state"], steps)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), later, stored["later"])
    assert dpoptax.ledgers(state)[0].releases == STEPS + 2


def test_a_new_field_of_a_strategy_keeps_its_key():
    """A checksum of `repr` refused old states after such a change."""

    @dataclasses.dataclass(frozen=True)
    class Extended(matrix.BandedToeplitz):
        new_option: bool = False

    old, new = matrix.BandedToeplitz((1.0, 0.5)), Extended((1.0, 0.5))
    assert repr(old) != repr(new)
    assert old.checkpoint_key == new.checkpoint_key


MECHANISM = Mechanism(1.0, 10.0)
CHANGES = {
    "unproven": "a reason",
    "strategy": matrix.BandedToeplitz((1.0, 0.5)),
    "fixed_point": True,
    "sensitivity": 2.0,
    "schedule": ((0, 1.0), (5, 2.0)),
    "sampler": "PoissonSampler(dataset_size=100, batch_size=10)",
}


def test_checkpoint_key_covers_every_field():
    covered = {"noise_multiplier", "batch_size", *CHANGES}  # the first two are stored themselves
    assert {field.name for field in dataclasses.fields(Mechanism)} == covered
    changed = [dataclasses.replace(MECHANISM, **{name: x}) for name, x in CHANGES.items()]
    keys = {mechanism.checkpoint_key for mechanism in (MECHANISM, *changed)}
    assert len(keys) == 1 + len(CHANGES)


def test_strategies_of_different_parameters_have_different_keys():
    strategies = [
        matrix.BandedToeplitz((1.0, 0.5)),
        matrix.BandedToeplitz((1.0, 0.25)),
        matrix.BufferedToeplitz((0.5,), (0.4,), steps=9),
        matrix.BufferedToeplitz((0.4,), (0.5,), steps=9),
        matrix.BufferedToeplitz((0.5,), (0.4,), steps=8),
    ]
    assert len({strategy.checkpoint_key for strategy in strategies}) == len(strategies)
