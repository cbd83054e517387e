"""What each field of a config is part of, and that nothing reads a field it does not depend on."""

import dataclasses
import inspect

import pytest

from dpoptax.training import methods
from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import Disk
from dpoptax.training.roles import Part, Role, field, role_of
from dpoptax.training.search import settings

OWNERS = (Role.KEPT, Role.PLANNED, Role.CHANGEABLE)


@pytest.mark.parametrize("declared", dataclasses.fields(TrainConfig), ids=lambda each: each.name)
def test_every_field_of_a_config_says_what_it_is_part_of(declared):
    assert sum(owner in role_of(declared) for owner in OWNERS) == 1


def test_what_a_method_changes_in_the_release_is_priced():
    # Of the shipped methods these fields alone may be drawn from a range without a price of their
    # own: they are of gradient points, filters, and of a method for which no ε is stated.
    unpriced = {
        each.name
        for method in vars(methods).values()
        if inspect.isclass(method)
        for each in dataclasses.fields(method)
        if Role.UNPRICED in role_of(each)
    }
    assert unpriced == {"kappa", "gamma", "beta", "momentum", "preset"}


def test_a_range_needs_a_field_without_a_price_in_every_config():
    @dataclasses.dataclass(frozen=True)
    class Own(Disk):
        kappa: float = 0.7  # says nothing, so it counts as priced

    ranged = ("method.kappa=uniform:0.1:0.9",)
    (one,) = settings.costs({"disk": TrainConfig(method=Disk())}, ranged)
    assert 0.1 < one.config.method.kappa < 0.9
    with pytest.raises(settings.ConfigError, match=r"method.kappa=uniform:0.1:0.9 changes"):
        settings.costs({"a": TrainConfig(method=Disk()), "b": TrainConfig(method=Own())}, ranged)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the test below."""

    steps: int = field(3, Role.STEP)
    seed: int = field(0, Role.KEPT)


def test_a_part_has_its_fields_and_is_equal_by_them():
    part = Part(Settings(), Role.STEP)
    assert part.steps == 3
    assert part == Part(Settings(seed=1), Role.STEP) != Part(Settings(steps=4), Role.STEP)
    assert hash(part) == hash(Part(Settings(seed=1), Role.STEP))
    with pytest.raises(AttributeError, match=r"seed was read by what depends on fields of Role"):
        _ = part.seed
