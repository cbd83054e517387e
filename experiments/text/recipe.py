"""The recipe `python -m experiments text`: MiniLM on AG News and SST-2 at several ε."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.models.transformer import Lora
from experiments.text.encoder import features, fetch_minilm, load_encoder, tokenize
from experiments.text.gauge import split_start
from experiments.text.texts import LENGTHS, Texts, read_texts
from experiments.text.training import (
    Problem,
    Settings,
    Trained,
    accuracy,
    make_plan,
    start_head,
    train,
)

NAMES = {"agnews": "AG News", "sst2": "SST-2"}
_PROJECTIONS = ("query", "value", "attention_output", "intermediate", "output")


@dataclasses.dataclass(frozen=True)
class TextArguments:
    """Classifies texts with MiniLM: a private head, and private LoRA below it.

    Attributes:
        data_dir: Folder with the labelled texts, agnews_*.tsv and SST-2_*.tsv, or the same with
            .xz.
        cache_dir: Folder for the weights, which the package index provides, and for features.
        data: Data sets.
        epsilons: Values of ε, at δ = 1e-5.
        seeds: Number of runs for each value.
        output: File for a line of JSON for each run. Runs that it already holds are not repeated.
    """

    data_dir: Path
    cache_dir: Path = Path("runs/text")
    data: tuple[str, ...] = ("agnews", "sst2")
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    seeds: int = 5
    output: Path | None = None


class Arm(NamedTuple):
    """A way to train.

    Attributes:
        name: Its name in tables.
        lora: Settings of the steps on head and LoRA; None to train the head alone.
        first: Number of the first layer with LoRA.
        rank: Rank of LoRA.
    """

    name: str
    lora: Settings | None = None
    rank: int = 4
