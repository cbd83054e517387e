"""GLUE's sentence classification, E2E and DART from the files in which they are published.

GLUE's labelled split for evaluation is dev.tsv: the labels of its test split are not public.
"""

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training.data.dataset import Dataset, Split
from experiments.data.formats import damaged, find, members, missing
from experiments.data.published_data import PublishedDataset, TextDataset, register
from experiments.data.tokens import Tokens

ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """The layout of one task's files.

    Attributes:
        folder: Where GLUE's archives have them.
        archive: Name of the task's own archive.
        columns: Header of the one or two columns of text, and of the label.
        labels: The label's values in the order of their numbers.
        train_size: Number of training examples.
        dev: Name of the file for evaluation.
        broken_rows: Whether rows of another number of columns are known, and left out by all.
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
    """A GLUE task from its TSV files: one header line, then a line for each example, no quoting.

    MNLI is evaluated on the matched genres. QQP's few broken rows are left out, as is usual. Where
    the training file has a column "user" too, which none that is published has, it says whose each
    example is.

    Args:
        data_dir: Holds the task's files, its folder, or its archive.
        tokens: How the texts become arrays.
        name: The name it is registered under.

    Raises:
        ConfigError: A file missing or damaged, or no tokenizer.
    """
    task, paths = GLUE[name], find_glue(data_dir, name=name)
    tokens.tokenizer()  # raises where there is none, before files are read
    splits, owners = [], []
    for path in paths:
        *texts, labels, users = zip(*_read_tsv(path, task), strict=True)
        owners.append(None if users[0] is None else np.array(users))
        inputs = tokens.sentences(*texts)
        splits.append({"inputs": inputs, "labels": np.array(labels, np.int32)})
    return Dataset(name, splits[0], splits[1], len(task.labels), owners=owners[0])


def find_glue(data_dir: Path, *, name: str) -> list[Path]:
    """The files of a task, those for training first; see `load_glue`."""
    task = GLUE[name]
    return _files(data_dir, (task.folder,), ("train.tsv", task.dev), name, task.archive)


def _read_tsv(path: Path, task: GlueTask) -> Iterator[tuple[Any, ...]]:
    """Of each row its texts, the number of its label, and its user or None."""
    # Split by hand: quotes are text, and so are the line separators of Unicode.
    header, *lines = _text(path).removesuffix("\n").split("\n")
    names = header.rstrip("\r").split("\t")
    absent = [column for column in task.columns if column not in names]
    if absent or not lines:
        found = f"no column {absent[0]!r} in its header {names}" if absent else "no examples"
        raise damaged(path, f"it has {found}")
    places = [names.index(column) for column in task.columns]
    owner = names.index("user") if "user" in names else None
    for number, line in enumerate(lines, start=2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(names):
            if task.broken_rows:
                continue
            raise damaged(path, f"line {number} has {len(cells)} columns, want {len(names)}")
        *texts, label = (cells[place] for place in places)
        if label not in task.labels:
            raise damaged(path, f"line {number} has label {label!r}, want one of {task.labels}")
        user = None if owner is None else cells[owner].strip()
        if user == "":
            raise damaged(path, f"line {number} has no user in a file with that column")
        yield *texts, task.labels.index(label), user


def load_e2e(data_dir: Path, tokens: Tokens) -> Dataset:
    """The E2E challenge from its CSV files with columns mr and ref: restaurants to sentences.

    A meaning representation `name[Aromi], food[Italian]` is written `name : Aromi | food :
    Italian`, the usual form for GPT-2.

    Raises:
        ConfigError: A file missing or damaged, or no tokenizer.
    """
    return _generation("e2e", find_e2e(data_dir), _read_e2e, tokens)


def find_e2e(data_dir: Path) -> list[Path]:
    """The files, those for training first; see `load_e2e`."""
    names = ("trainset.csv", "devset.csv")
    return _files(data_dir, ("e2e", "e2e-dataset"), names, "e2e", "e2e-dataset.zip")


def _read_e2e(path: Path) -> Iterator[tuple[str, str]]:
    rows = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        for row in rows:
            if not row.get("mr") or row.get("ref") is None:
                raise damaged(path, f"line {rows.line_num} lacks one of its columns mr and ref")
            slots = [slot.strip().removesuffix("]") for slot in row["mr"].split("],")]
            yield " | ".join(slot.replace("[", " : ", 1) for slot in slots), row["ref"]
    except csv.Error as error:
        raise damaged(
            path, f"what follows line {rows.line_num} is no row of CSV ({error})"
        ) from error


def load_dart(data_dir: Path, tokens: Tokens) -> Dataset:
    """DART from its JSON files: triples of subject, relation and object to sentences.

    Every annotation of a set of triples is an example. A set is written `subject : relation :
    object | ...`, the usual form for GPT-2.

    Raises:
        ConfigError: A file missing or damaged, or no tokenizer.
    """
    return _generation("dart", find_dart(data_dir), _read_dart, tokens)


def find_dart(data_dir: Path) -> list[Path]:
    """The files, those for training first; see `load_dart`."""
    names = [f"dart-v1.1.1-full-{split}.json" for split in ("train", "dev")]
    return _files(data_dir, ("dart", "dart/data/v1.1.1", "data/v1.1.1"), names, "dart")


def _read_dart(path: Path) -> Iterator[tuple[str, str]]:
    try:
        for entry in json.loads(_text(path)):
            triples = " | ".join(" : ".join(map(str, triple)) for triple in entry["tripleset"])
            for annotation in entry["annotations"]:
                yield triples, annotation["text"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise damaged(path, f"it is no list of triplesets with annotations ({reason})") from error


def _generation(name: str, paths: list[Path], read: Any, tokens: Tokens) -> Dataset:
    tokens.tokenizer()  # raises where there is none, before files are read
    splits: list[Split] = []
    for path in paths:
        pairs = list(read(path))
        if not pairs:
            raise damaged(path, "it has no examples")
        sources, targets = zip(*pairs, strict=True)
        inputs, labels = tokens.continuations(sources, targets)
        splits.append({"inputs": inputs, "labels": labels})
    references: dict[str, list[str]] = {}
    for source, target in pairs:  # of the last file, the test split
        references.setdefault(source, []).append(target)
    texts = tuple((source, tuple(targets)) for source, targets in references.items())
    return TextDataset(name, splits[0], splits[1], 0, texts=texts)


def _files(
    data_dir: Path,
    folders: tuple[str, ...],
    names: Sequence[str],
    dataset: str,
    archive: str | None = None,
) -> list[Path]:
    """The files, or ARCHIVE/NAME for those that only the archive can have."""
    packed = find(data_dir, folders, [archive]) if archive else None
    paths = []
    for name in names:
        path = find(data_dir, folders, [name]) or (packed and packed / name)
        if path is None:
            wanted = f"{name} or {archive}" if archive else name
            raise missing(dataset, data_dir, wanted)
        paths.append(path)
    return paths


def _text(path: Path) -> str:
    packed = path.parent.is_file()
    content = next(members(path.parent, [path.name])) if packed else path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is no text in UTF-8 ({error})") from error


for _name, _task in GLUE.items():
    register(
        _name,
        PublishedDataset(
            functools.partial(load_glue, name=_name),
            _task.train_size,
            num_classes=len(_task.labels),
            kind="sentences",
            find=functools.partial(find_glue, name=_name),
        ),
    )
register("e2e", PublishedDataset(load_e2e, 42_061, kind="generation", find=find_e2e))
register("dart", PublishedDataset(load_dart, 62_659, kind="generation", find=find_dart))
