"""Lists the training problems on which the released update rules are compared."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax

from experiments.data.dictionary import Dictionary
from experiments.data.features import FeatureMap
from experiments.data.published_data import PUBLISHED, PublishedSpec
from experiments.data.scattering import Scattering


@dataclasses.dataclass(frozen=True)
class Halved:
    """Means over 2 × 2 pixels; a `FeatureMap`."""

    name: ClassVar[str] = "halved"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of half the height and width."""
        height, width, colors = shape
        return height // 2, width // 2, colors

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from images (N, *shape) to means."""
        height, width, colors = self.shape(shape)
        return jax.jit(
            lambda images: images.reshape(-1, height, 2, width, 2, colors).mean(axis=(2, 4))
        )


@dataclasses.dataclass(frozen=True)
class Composed:
    """Features of features: `second` of `first`; a `FeatureMap`."""

    first: FeatureMap
    second: FeatureMap

    @property
    def name(self) -> str:
        """The names of both maps."""
        return f"{self.first.name}-{self.second.name}"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the second features."""
        return self.second.shape(self.first.shape(shape))

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled composition of both maps."""
        first, second = self.first.transform(shape), self.second.transform(self.first.shape(shape))
        return jax.jit(lambda images: second(first(images)))


class Problem(NamedTuple):
    """A linear model on images or their features, with the epochs of two papers.

    Attributes:
        title: Its name in tables.
        dataset: Name of the data set.
        pmlf_epochs: Epochs of DP-PMLF.
        disk_epochs: Epochs of DiSK.
        features: Map that replaces the images. None: the images themselves.
        epsilons: Stated values of ε.
        left_out: Names of arms that are not trained.
    """

    title: str
    dataset: str
    pmlf_epochs: int
    disk_epochs: int
    features: FeatureMap | None = None
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    left_out: tuple[str, ...] = ()

    @property
    def examples(self) -> int:
        """N."""
        return PUBLISHED[self.dataset].train_size

    def data(self, data_dir: Path) -> PublishedSpec:
        """Returns the specification of the data."""
        return PublishedSpec(self.dataset, data_dir, features=self.features)


_CIFAR = Problem(
    "CIFAR-10, images",
    "cifar10",
    pmlf_epochs=20,
    disk_epochs=80,
    features=Halved(),
    left_out=(
        "DP-SGD, filter",
        "DP-SGD, rate × 20",
        "released, filter gain 10",
        "paper, normalized",
    ),
)
PROBLEMS = {
    "linear-mnist": Problem("MNIST", "mnist", pmlf_epochs=25, disk_epochs=40),
    "linear-cifar10": _CIFAR,
    "scattering-cifar10": _CIFAR._replace(
        title="CIFAR-10, scattering",
        features=Composed(Halved(), Scattering(angles=4, groups=15)),
    ),
    "dictionary-cifar10": _CIFAR._replace(title="CIFAR-10, dictionary", features=Dictionary(50)),
}
"""The problems by the name of their file of records.

To save time, images of CIFAR-10 are halved (768 numbers), also before scattering with few angles
(1,200 numbers), and the dictionary is small (900 numbers).
"""
TUNED = {
    "normalized-mnist": PROBLEMS["linear-mnist"],
    "normalized-cifar10": PROBLEMS["dictionary-cifar10"],
}
"""Problems on which learning rates are tuned, by the name of their file of records."""
