"""Builds models that start from published weights, with sizes from checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn

from dpoptax.training.errors import ConfigError, unknown_name
from experiments.data.published_data import Kind
from experiments.models import MODELS, pretrained
from experiments.models.language import RobertaClassifier
from experiments.models.transformer import Lora
from experiments.models.vision import VitClassifier


class PublishedModel(NamedTuple):
    """A model with published weights.

    Attributes:
        module: Its flax module.
        kind: The kind of its examples.
        sizes: Published fields of the module, for a config without a checkpoint.
    """

    module: type[nn.Module]
    kind: Kind
    sizes: dict[str, int]


PUBLISHED_MODELS: dict[str, PublishedModel] = {
    "roberta_base": PublishedModel(RobertaClassifier, "sentences", {}),
    "roberta_large": PublishedModel(
        RobertaClassifier,
        "sentences",
        {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    ),
    "vit_small_published": PublishedModel(VitClassifier, "images", {}),
}
"""Models that start from a checkpoint, by name."""

_PROJECTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    RobertaClassifier: ("query", "key", "value"),
    VitClassifier: ("query", "key", "value"),
}
_COMMON_PROJECTIONS = ("attention_output", "intermediate", "output")


def build_published(
    name: str, num_classes: int, folder: Path | None, lora: Lora | None, sequence_length: int
) -> nn.Module:
    """Builds the published model `name` with the sizes of the config.json in `folder`.

    Args:
        name: A name of `PUBLISHED_MODELS`.
        num_classes: Number of classes.
        folder: Folder of a checkpoint. None: the model has the published sizes.
        lora: Corrections to train. Without projections, those of query and value.
        sequence_length: Number of tokens per example.

    Raises:
        ConfigError: The checkpoint has another kind of model, the model lacks a projection, or a
            row of tokens is too long.
    """
    module, kind, sizes = PUBLISHED_MODELS[name]
    fields: dict[str, Any] = dict(sizes)
    if folder is not None:
        fields = pretrained.fields_of(folder, module)
    fields["num_classes"] = num_classes
    if lora is not None:
        own = _PROJECTIONS[module]
        chosen = lora.projections or tuple(name for name in own if name != "key")
        for projection in chosen:
            if projection not in (*own, *_COMMON_PROJECTIONS):
                raise unknown_name("lora_projections", projection, (*own, *_COMMON_PROJECTIONS))
        fields["lora"] = Lora(lora.rank, lora.alpha, chosen)
        fields |= {"frozen": True} if module is VitClassifier else {}
    model: Any = module(**fields)
    if kind == "sentences":
        longest = model.positions - model.padding - 1
        if sequence_length > longest:
            raise ConfigError(
                f"`sequence_length` must be at most {longest}, the number of positions of "
                f"model={name!r}, got {sequence_length}."
            )
    return model


def check_kind(model: str, dataset: str, kind: Kind) -> None:
    """Raises a ConfigError if a model does not take the examples of a data set."""
    kinds: dict[str, Kind] = dict.fromkeys(MODELS, "images")
    kinds |= {name: published.kind for name, published in PUBLISHED_MODELS.items()}
    if model not in kinds:
        raise unknown_name("model", model, kinds)
    if kinds[model] != kind:
        names = ", ".join(sorted(name for name, own in kinds.items() if own == kind))
        raise ConfigError(
            f"`model` must be for {kind}, the examples of dataset={dataset!r}, got {model!r}, "
            f"which is for {kinds[model]}. Use one of {names}."
        )
