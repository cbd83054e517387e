"""Reads GLUE's sentence classification from its published files.

The evaluation split of GLUE is dev.tsv, because the labels of its test split are not public.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training import Dataset
from experiments.data.formats import damaged, find, members, missing
from experiments.data.published_data import PUBLISHED, PublishedDataset
from experiments.data.tokens import Tokens

ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """The layout of one task's files.

    Attributes:
        folder: Folder of the task in GLUE's archives.
        archive: Name of the task's archive.
        columns: Headers of the one or two columns of text, and of the label.
        labels: Values of the label, in the order of their numbers.
        train_size: Number of training examples.
        dev: Name of the evaluation file.
        broken_rows: Whether the file is known to have rows with a wrong number of columns, which
            are commonly left out.
    """

    folder: str
    archive: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    train_size: int
    dev: str = "dev.tsv"
    broken_rows: bool = False


GLUE = {
    "sst2": GlueTask("SST-2", "SST-2.zip", ("sentence", "label"), ("0", "1"), 67_349),
    "qnli": GlueTask("QNLI", "QNLIv2.zip", ("question", "sentence", "label"), ENTAILMENT, 104_743),
    "mnli": GlueTask(
        "MNLI",
        "MNLI.zip",
        ("sentence1", "sentence2", "gold_label"),
        ("entailment", "neutral", "contradiction"),
        392_702,
        dev="dev_matched.tsv",
    ),
    "qqp": GlueTask(
        "QQP",
        "QQP-clean.zip",
        ("question1", "question2", "is_duplicate"),
        ("0", "1"),
        363_846,
        broken_rows=True,
    ),
}


def load_glue(data_dir: Path, tokens: Tokens, *, name: str) -> Dataset:
    """Reads a GLUE task from TSV files with a header line and one example per line.

    MNLI is evaluated on the matched genres. The few broken rows of QQP are left out, as is usual.

    Args:
        data_dir: Folder of the task's files, of its folder, or of its archive.
        tokens: Settings that turn texts into arrays.
        name: Name under which the task is registered.

    Raises:
        ConfigError: A file is missing or damaged, or the tokenizer is missing.
    """
    task, paths = GLUE[name], find_glue(data_dir, name=name)
    tokens.tokenizer()  # raises before files are read if the tokenizer is missing
    splits = []
    for path in paths:
        *texts, labels = zip(*_read_tsv(path, task), strict=True)
        inputs = tokens.sentences(*texts)
        splits.append({"inputs": inputs, "labels": np.array(labels, np.int32)})
    return Dataset(name, splits[0], splits[1], len(task.labels))


def find_glue(data_dir: Path, *, name: str) -> list[Path]:
    """Returns the files of a task, training first, or ARCHIVE/NAME; see `load_glue`."""
    task = GLUE[name]
    packed = find(data_dir, (task.folder,), [task.archive])
    paths = []
    for file in ("train.tsv", task.dev):
        path = find(data_dir, (task.folder,), [file]) or (packed and packed / file)
        if path is None:
            raise missing(name, data_dir, f"{file} or {task.archive}")
        paths.append(path)
    return paths


def _read_tsv(path: Path, task: GlueTask) -> Iterator[tuple[Any, ...]]:
    """Yields the texts and the number of the label of each row."""
    # The csv module is not used: quotes and Unicode line separators are part of the text.
    header, *lines = _text(path, task.folder).removesuffix("\n").split("\n")
    names = header.rstrip("\r").split("\t")
    absent = [column for column in task.columns if column not in names]
    if absent or not lines:
        found = f"no column {absent[0]!r} in its header {names}" if absent else "no examples"
        raise damaged(path, f"it has {found}")
    places = [names.index(column) for column in task.columns]
    for number, line in enumerate(lines, start=2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(names):
            if task.broken_rows:
                continue
            raise damaged(path, f"line {number} has {len(cells)} columns instead of {len(names)}")
        *texts, label = (cells[place] for place in places)
        if label not in task.labels:
            raise damaged(
                path, f"line {number} has label {label!r}, which is not one of {task.labels}"
            )
        yield *texts, task.labels.index(label)


def _text(path: Path, top: str) -> str:
    content = next(members(path.parent, top, [path.name]))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is not a UTF-8 text ({error})") from error


for _name, _task in GLUE.items():
    PUBLISHED[_name] = PublishedDataset(
        functools.partial(load_glue, name=_name),
        functools.partial(find_glue, name=_name),
        _task.train_size,
        len(_task.labels),
        kind="sentences",
    )
