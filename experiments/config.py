"""Defines the config of an experiment: published data, or published weights.

Importing this module registers the data sets and the models of the experiments.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

import flax.linen as nn
import jax

from dpoptax.training import ConfigError, TrainConfig, load_configs
from dpoptax.training.models import Variables
from dpoptax.training.roles import Numbers, Role, field
from experiments.data import PUBLISHED
from experiments.data.dictionary import Dictionary
from experiments.data.features import FeatureMap
from experiments.data.published_data import PublishedSpec
from experiments.data.scattering import Colors, Scattering
from experiments.data.tokens import Tokens
from experiments.methods import Augmented
from experiments.models import pretrained
from experiments.models.published_models import PUBLISHED_MODELS, build_published, check_kind
from experiments.models.transformer import Lora

Features = Literal["none", "scattering", "dictionary"]
"""Features that replace images."""

_COUNT = Numbers(lambda x: isinstance(x, int) and x >= 1, "a positive integer")
_LENGTH = Numbers(lambda x: isinstance(x, int) and x >= 2, "an integer of at least 2")
_POSITIVE = Numbers(lambda x: 0 < x < math.inf, "positive and finite")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(TrainConfig):
    """Configures training on published data or from published weights.

    `dataset` also names mnist, fashion_mnist, cifar10, cifar100 and imagenet; sst2, qnli, mnli and
    qqp; e2e and dart. `model` also names the models of `experiments.models`.
    """

    features: Features = field("none", Role.UNPRICED)
    """Features that replace images. none: the images. scattering: fixed means of wavelet moduli.
    dictionary: responses to many patches drawn from a random process. Both are functions of one
    example, so they cost no privacy. They are computed once and kept on disk."""
    scattering_scale: int = field(2, Role.UNPRICED, _COUNT)
    """Binary logarithm of the width of a feature's window in pixels. It also lowers the
    resolution."""
    scattering_angles: int = field(8, Role.UNPRICED, _COUNT)
    """Number of directions of the wavelets."""
    feature_groups: int | None = field(27, Role.UNPRICED, _COUNT)
    """Number of groups of scattering channels, each normalized over one example. None: no
    normalization."""
    feature_colors: Colors = field("given", Role.UNPRICED)
    """Channels for scattering. given: those of the image. opponent: the sum and two differences of
    red, green and blue, a fixed map of one pixel."""
    dictionary_filters: int = field(200, Role.UNPRICED, _COUNT)
    """Number of patches in the dictionary. The mirror image of each is added."""
    dictionary_patch: int = field(5, Role.UNPRICED, _COUNT)
    """Height and width of a patch of the dictionary, in pixels."""
    dictionary_grid: int = field(3, Role.UNPRICED, _COUNT)
    """Cells along each side of an image; features are means over a cell."""
    pretrained: Path | None = None
    """Folder of a published model, with config.json, model.safetensors and, for texts, the files of
    the tokenizer. Training starts from its weights."""
    sequence_length: int = field(128, numbers=_LENGTH)
    """Number of tokens per example. Longer texts are cut, and shorter ones are padded."""
    lora_rank: int | None = field(None, numbers=_COUNT)
    """Rank of the trained correction to each projection of a published model. All other weights
    except the classification head are frozen. None: all weights are trained."""
    lora_alpha: float = field(16.0, numbers=_POSITIVE)
    """The correction is multiplied by lora_alpha / lora_rank."""
    lora_projections: tuple[str, ...] = ()
    """Names of the corrected projections. Without names: query and value, or GPT-2's joint
    projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features != "none" and isinstance(self.method, Augmented):
            raise ConfigError(
                f"`features` must be 'none' for method={self.method.name}, which alters the images "
                f"of each step, got {self.features!r}. Features are computed once. Use another "
                "method, or features='none'."
            )

    def data(self, *, progress: bool = False) -> PublishedSpec:
        """Returns the specification of the data, with its tokenizer and its features."""
        return PublishedSpec(self.dataset, self.data_dir, progress, self.tokens, self.feature_map)

    def build_model(self, num_classes: int | None) -> nn.Module:
        """Builds the model that `model` names, with LoRA if `lora_rank` is given.

        Raises:
            ConfigError: The model does not fit the data or the checkpoint.
        """
        assert num_classes is not None
        known = PUBLISHED.get(self.dataset)
        check_kind(self.model, self.dataset, "images" if known is None else known.kind)
        if self.model in PUBLISHED_MODELS:
            lora = None
            if self.lora_rank is not None:
                lora = Lora(self.lora_rank, self.lora_alpha, self.lora_projections)
            return build_published(
                self.model, num_classes, self.pretrained, lora, self.sequence_length
            )
        for name in ("pretrained", "lora_rank"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` must be None for model={self.model!r}, which has no published "
                    f"weights, got {getattr(self, name)!r}. Omit it."
                )
        return super().build_model(num_classes)

    def initial_variables(self, model: nn.Module, inputs: jax.Array, key: jax.Array) -> Variables:
        """Returns the initial variables, with the published weights of `pretrained`.

        Raises:
            ConfigError: A published model has no checkpoint, or the checkpoint of another model.
        """
        if self.pretrained is None and self.model in PUBLISHED_MODELS:
            raise ConfigError(
                f"`pretrained` must be given for model={self.model!r}, which starts from published "
                "weights, got None. Pass --pretrained, a directory with config.json and "
                "model.safetensors."
            )
        variables = super().initial_variables(model, inputs, key)
        if self.pretrained is None:
            return variables
        return Variables(**pretrained.load_weights(self.pretrained, model, variables._asdict()))

    @property
    def tokens(self) -> Tokens:
        """Returns the settings that turn texts into arrays."""
        return Tokens(self.pretrained, self.sequence_length)

    @property
    def feature_map(self) -> FeatureMap | None:
        """Returns the map that replaces images by features, or None."""
        if self.features == "none":
            return None
        if self.features == "dictionary":
            return Dictionary(self.dictionary_filters, self.dictionary_patch, self.dictionary_grid)
        return Scattering(
            self.scattering_scale,
            self.scattering_angles,
            self.feature_groups,
            self.feature_colors,
        )


def load_experiments(path: str | Path) -> dict[str, ExperimentConfig]:
    """Reads the experiment configs of a file; see `load_configs`.

    Raises:
        ConfigError: As for `load_configs`, or a config has another class.
    """
    configs = load_configs(path)
    found = {n: config for n, config in configs.items() if isinstance(config, ExperimentConfig)}
    if len(found) < len(configs):
        raise ConfigError(
            f"The config file {path} must return an ExperimentConfig, got a TrainConfig."
        )
    return found
