"""Builds models that start from published weights, with sizes from checkpoints."""

from pathlib import Path
from typing import Any

from dpoptax.training.errors import ConfigError, unknown_name
from experiments.data.published_data import Kind
from experiments.models import MODELS, pretrained
from experiments.models.language import RobertaClassifier
from experiments.models.transformer import Lora

PUBLISHED_MODELS: dict[str, dict[str, Any]] = {
    "roberta_base": {},
    "roberta_large": {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
}
"""Fields of `RobertaClassifier` for a config without a checkpoint, by the name of the model."""

_PROJECTIONS = ("query", "key", "value", "attention_output", "intermediate", "output")


def build_published(
    name: str, num_classes: int, folder: Path | None, lora: Lora | None, sequence_length: int
) -> RobertaClassifier:
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
    fields = PUBLISHED_MODELS[name]
    if folder is not None:
        fields = pretrained.fields_of(folder, RobertaClassifier)
    if lora is not None:
        chosen = lora.projections or ("query", "value")
        for projection in chosen:
            if projection not in _PROJECTIONS:
                raise unknown_name("lora_projections", projection, _PROJECTIONS)
        lora = Lora(lora.rank, lora.alpha, chosen)
    model = RobertaClassifier(**fields, num_classes=num_classes, lora=lora)
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
    kinds |= dict.fromkeys(PUBLISHED_MODELS, "sentences")
    if model not in kinds:
        raise unknown_name("model", model, kinds)
    if kinds[model] != kind:
        names = ", ".join(sorted(name for name, own in kinds.items() if own == kind))
        raise ConfigError(
            f"`model` must be for {kind}, the examples of dataset={dataset!r}, got {model!r}, "
            f"which is for {kinds[model]}. Use one of {names}."
        )
