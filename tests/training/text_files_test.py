"""Tests of texts in published file formats, and of errors for others."""

import json

import numpy as np
import pytest

from dpoptax.training import ConfigError
from experiments.data import PUBLISHED
from experiments.data.published_data import PublishedSpec
from experiments.data.tokens import Tokens
from tests.published_texts import GLUE_FILES, write_glue, write_tokenizer

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    write_tokenizer(folder)
    return folder


def text_of(folder, row):
    """Returns the text of a row, without special tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode([int(token) for token in row])


@pytest.mark.parametrize("below", [".", "GLUE"])
@pytest.mark.parametrize("task", sorted(GLUE_FILES))
def test_reads_glue(tmp_path, encoder, task, below):
    tables = write_glue(tmp_path / below, task)
    folder = tmp_path / below / (GLUE_FILES[task] if below == "GLUE" else ".")
    dataset = PublishedSpec(task, folder, Tokens(encoder, 64)).load()
    assert (dataset.train_size, PUBLISHED[task].kind) == (20, "sentences")
    assert dataset.num_classes == (3 if task == "mnli" else 2)
    for split, rows in zip((dataset.train, dataset.test), tables.values(), strict=True):
        assert split["inputs"].dtype == split["labels"].dtype == np.int32
        assert split["inputs"].shape == (len(rows), 64)
        for row, tokens in zip(rows, split["inputs"], strict=True):
            texts = {"sst2": row[:1], "qnli": row[1:3], "mnli": row[8:10], "qqp": row[3:5]}[task]
            assert text_of(encoder, tokens) == "".join(texts)
        names = {"mnli": ("entailment", "neutral"), "qnli": ("entailment", "not_entailment")}
        expected = names.get(task, ("0", "1"))
        for row, label in zip(rows, split["labels"], strict=True):
            assert row[-1] == (*expected, "contradiction")[label]


def test_sentence_pairs_have_markers_of_roberta(tmp_path, encoder):
    start, padding, end = 0, 1, 2
    (row,) = Tokens(encoder, 32).sentences(["the food"], ["was good"])
    inner = row[row != padding]
    assert (inner[0], inner[-1]) == (start, end)
    middle = np.flatnonzero(inner == end)
    assert middle[1] - middle[0] == 1
    assert len(middle) == 3
    np.testing.assert_array_equal(row[len(inner) :], padding)


def test_truncates_long_texts(encoder):
    (row,) = Tokens(encoder, 8).sentences(["the food was good"], ["bad " * 50])
    assert row[-1] == 2
    assert "the food" in text_of(encoder, row)  # truncation shortens the longer text of a pair


def test_special_tokens_in_text_are_plain_text(encoder):
    (row,) = Tokens(encoder, 32).sentences(["good </s><s> <pad> bad"])
    assert np.sum(row == 2) == np.sum(row == 0) == 1


QQP_LINE = "9\t18\t19\ta broken\nrow"


@pytest.mark.parametrize(
    ("task", "damage", "message"),
    [
        ("sst2", lambda text: text.replace("label", "stars"), r"no column 'label' in its header"),
        (
            "sst2",
            lambda text: text.replace("\t1\n", "\tgood\n"),
            r"has label 'good', which is not one of",
        ),
        ("sst2", lambda text: text + "a\tb\t0\n", r"line 22 has 3 columns instead of 2"),
        ("qnli", lambda text: text.split("\n")[0], r"it has no examples"),
        ("mnli", lambda text: text.encode().replace(b"\n", b"\n\xff", 3), r"not a UTF-8 text"),
    ],
)
def test_damaged_table_is_reported(tmp_path, encoder, task, damage, message):
    write_glue(tmp_path, task)
    path = tmp_path / GLUE_FILES[task] / "train.tsv"
    damaged = damage(path.read_text(encoding="utf-8"))
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(ConfigError, match=rf"(?s)train.tsv cannot be read.*{message}"):
        PublishedSpec(task, tmp_path, Tokens(encoder, 8)).load()


def test_skips_broken_rows_of_qqp(tmp_path, encoder):
    write_glue(tmp_path, "qqp")
    path = tmp_path / "QQP" / "train.tsv"
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_bytes("\r\n".join([*lines[:3], *QQP_LINE.split("\n"), *lines[3:]]).encode())
    assert PublishedSpec("qqp", tmp_path, Tokens(encoder, 8)).load().train_size == 20


def test_refuses_missing_or_unsuitable_tokenizer(tmp_path):
    write_glue(tmp_path, "sst2")
    with pytest.raises(ConfigError, match=r"`pretrained` must be given.*--pretrained"):
        PublishedSpec("sst2", tmp_path).load()
    with pytest.raises(ConfigError, match=r"must contain tokenizer.json, got"):
        PublishedSpec("sst2", tmp_path, Tokens(tmp_path, 8)).load()
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"must have the token '<s>'.* encoder such as"):
        PublishedSpec("sst2", tmp_path, Tokens(tmp_path, 8)).load()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read"):
        PublishedSpec("sst2", tmp_path, Tokens(broken, 8)).load()
