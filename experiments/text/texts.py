"""Reads AG News and SST-2, and the sentence that owns each phrase of SST-2."""

import csv
import dataclasses
import io
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpoptax.training.errors import ConfigError, unknown_name

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
_FILES = {
    "agnews": (("agnews_dev",), "agnews_test"),
    "sst2": (("SST-2_train", "SST-2_dev"), "SST-2_test"),
}
LENGTHS = {"agnews": (48, 32), "sst2": (32, 24)}
"""Tokens per text, and how many of them LoRA sees in training. Longer texts are cut."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Labelled texts.

    Attributes:
        texts: The training texts.
        labels: Their classes, (texts,), int32.
        owners: The owner of each training text, (texts,), int64. The texts of an owner are
            protected together.
        test_texts: The texts of the published test split.
        test_labels: Their classes.
        classes: Number of classes.
    """

    texts: Sequence[str]
    labels: np.ndarray
    owners: np.ndarray
    test_texts: Sequence[str]
    test_labels: np.ndarray
    classes: int


def read_texts(name: str, folder: Path, *, per_owner: int = 2) -> Texts:
    """Reads the files of "agnews" or "sst2" in `folder`, compressed or not.

    A news item of AG News owns itself. A sentence of SST-2 owns its phrases; see `phrase_owners`.

    Args:
        name: "agnews" or "sst2".
        folder: Folder with the .tsv or .tsv.xz files.
        per_owner: The largest number of phrases of a sentence: the sentence, and random ones.

    Raises:
        ConfigError: A file is missing, or the name is unknown.
    """
    if name not in _FILES:
        raise unknown_name("dataset", name, _FILES)
    train_files, test_file = _FILES[name]
    read = _read_news if name == "agnews" else _read_phrases
    rows = [row for file in train_files for row in read(_text(folder, file))]
    test_texts, test_labels = zip(*read(_text(folder, test_file)), strict=True)
    test = np.array(test_labels, np.int32)
    if name == "agnews":
        texts, topics = zip(*rows, strict=True)
        owners = np.arange(len(texts))
        return Texts(texts, np.array(topics, np.int32), owners, test_texts, test, len(TOPICS))
    found = dict(rows)  # a phrase that is listed twice has one label
    phrases, owners = phrase_owners(list(found), per_owner)
    labels = np.array([found[phrase] for phrase in phrases], np.int32)
    return Texts(phrases, labels, owners, test_texts, test, 2)


def phrase_owners(phrases: Sequence[str], per_owner: int) -> tuple[list[str], np.ndarray]:
    """Returns phrases and the number of the sentence that owns each.

    The published files list phrases without their sentences. A sentence is a phrase that no other
    phrase contains. A phrase that several sentences contain is a record of each of them, so without
    one sentence, the records of the others are the same. Each sentence keeps itself, and
    `per_owner` − 1 of its other phrases, drawn by a seed that depends only on the sentence.
    """
    words = {tuple(phrase.split()): phrase for phrase in phrases}
    parts: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    inner: set[tuple[str, ...]] = set()
    for whole in words:
        n = len(whole)
        found = {whole[i:j] for i in range(n) for j in range(i + 1, n + 1)} & words.keys()
        parts[whole] = sorted(found - {whole})
        inner.update(parts[whole])
    texts: list[str] = []
    owners: list[int] = []
    for number, whole in enumerate(sorted(words.keys() - inner)):
        seed = int.from_bytes(" ".join(whole).encode()[-8:], "big")
        chosen = np.random.default_rng(seed).permutation(len(parts[whole]))[: per_owner - 1]
        kept = [whole, *(parts[whole][i] for i in chosen)]
        texts += [words[phrase] for phrase in kept]
        owners += [number] * len(kept)
    return texts, np.array(owners)


def read_news(path: Path) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a file with a text and its topic in each line, and their classes."""
    texts, topics = zip(*_read_news(path.read_text(encoding="utf-8")), strict=True)
    return list(texts), np.array(topics, np.int32)


def _read_news(text: str) -> list[tuple[str, int]]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t")
    return [(row[0], TOPICS.index(row[1])) for row in rows if row]


def _read_phrases(text: str) -> list[tuple[str, int]]:
    # The csv module is not used: quotes are part of the text.
    lines = text.removesuffix("\n").split("\n")[1:]
    cells = [line.rsplit("\t", 1) for line in lines]
    return [(phrase.strip(), int(label)) for phrase, label in cells]


def _text(folder: Path, name: str) -> str:
    plain, packed = folder / f"{name}.tsv", folder / f"{name}.tsv.xz"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    if packed.is_file():
        return lzma.decompress(packed.read_bytes()).decode("utf-8")
    raise ConfigError(
        f"`data_dir` must contain {plain.name} or {packed.name}, got {str(folder)!r} without them. "
        "Pass the folder with the labelled texts."
    )
