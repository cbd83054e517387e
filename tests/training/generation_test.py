"""Tests of generated texts: search against brute force, scores by hand, and the trainer."""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax.training import ConfigError, load_config, models
from dpoptax.training.cli.main import main
from dpoptax.training.data.dataset import NO_LABEL
from dpoptax.training.run import planning
from experiments.command_line import main as experiment
from experiments.config import ExperimentConfig
from experiments.data.published_data import load_published
from experiments.data.tokens import Tokens
from experiments.generation import generation
from experiments.generation.beam_search import beam_search
from experiments.models.language import Gpt2
from tests.published_texts import write_dart, write_e2e, write_published_model

END = 0


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("beams", "length_penalty"))
@functools.partial(jax.vmap, in_axes=(0, None, None))
def table_search(table, beams, length_penalty):
    """Searches where logits depend on the position and on the previous token."""

    def step(tokens, past, count):
        following = jnp.minimum(count + 1, len(table) - 1)
        return table[following][tokens], past

    options = {"beams": beams, "length_penalty": length_penalty}
    return beam_search(step, table[0, 0], (), end=END, max_tokens=len(table), **options)


TABLES = 2 * np.random.default_rng(0).normal(size=(40, 6, 4, 4)).astype(np.float32)


def reference_search(following, *, beams, length_penalty, max_tokens):
    """Searches by lists of (log-probability, tokens), as in the docstring of `beam_search`.

    `following(tokens)` returns the logits of the next token.
    """
    alive, ended = [(0.0, ())], []
    for count in range(max_tokens):
        continued = [
            (total + probability, (*tokens, token))
            for total, tokens in alive
            for token, probability in enumerate(log_softmax(np.float64(following(tokens))))
        ]
        continued = sorted(continued, reverse=True)[: 2 * beams]
        size = (count + 1) ** length_penalty
        closing = [(t / size, tokens) for t, tokens in continued[:beams] if tokens[-1] == END]
        ended = sorted(ended + closing, reverse=True)[:beams]
        alive = [entry for entry in continued if entry[1][-1] != END][:beams]
        if len(ended) == beams and ended[-1][0] >= alive[0][0] / size:
            return ended[0]
    return max(ended + [(total / size, tokens) for total, tokens in alive])


def padded(tokens, size):
    return [*tokens, *[END] * (size - len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize(("beams", "length_penalty"), [(1, 1.7), (2, 0.0), (3, 1.0), (5, 1.0)])
def test_beam_search_matches_docstring(beams, length_penalty):
    for table, tokens, score in zip(
        TABLES, *table_search(TABLES, beams, length_penalty), strict=True
    ):
        expected = reference_search(
            lambda tokens, table=table: table[len(tokens), tokens[-1] if tokens else 0],
            beams=beams,
            length_penalty=length_penalty,
            max_tokens=6,
        )
        assert tokens.tolist() == padded(expected[1], 6)
        assert float(score) == pytest.approx(expected[0], rel=1e-5)


def test_one_beam_is_greedy_search():
    for table, tokens in zip(TABLES, table_search(TABLES, 1, 1.0)[0], strict=True):
        expected = []
        for logits in table:
            expected.append(int(np.argmax(logits[expected[-1] if expected else 0])))
            if expected[-1] == END:
                break
        assert tokens.tolist() == padded(expected, 6)


@pytest.fixture(scope="module")
def tiny():
    """A GPT-2 with five tokens and weights large enough for distinct preferences."""
    model = Gpt2(5, width=8, depth=2, heads=2, hidden=16, positions=12)
    make = jax.jit(functools.partial(models.initial_variables, model))
    variables = make(jnp.zeros(3, jnp.int32), jax.random.key(1))
    return model, jax.tree.map(lambda x: x + 20 * x * (x.ndim > 1), variables)


_apply = jax.jit(models.apply, static_argnums=0)


def whole_logits(tiny, tokens):
    """Returns the logits after `tokens`, by the training model on a whole row."""
    row = np.full(tiny[0].positions, END, np.int32)
    row[: len(tokens)] = tokens
    return np.asarray(_apply(*tiny, row))[len(tokens) - 1]


PROMPTS = ([3, 1, 4, END], [2, END], [1, 1, 2, END], [4, 4, END], [1, 3, END], [2, 4, 1, END])


def generated(tiny, **options):
    generate = generation._generator(tiny[0], **options, end=END)
    rows = np.full((len(PROMPTS), 4), END, np.int32)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return np.asarray(generate(tiny[1], rows, np.array([len(p) for p in PROMPTS]))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_best_text(tiny, length_penalty):
    size = 3
    found = generated(tiny, beams=4**size, length_penalty=length_penalty, max_tokens=size)
    assert len({tuple(tokens) for tokens in found}) > 1
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        probabilities = {
            before: log_softmax(whole_logits(tiny, [*prompt, *before]).astype(np.float64))
            for count in range(size)
            for before in itertools.product(range(1, 5), repeat=count)
        }
        texts = [
            (*before, token)
            for before in probabilities
            for token in range(5)
            if token == END or len(before) == size - 1
        ]
        scores = {
            text: sum(probabilities[text[:i]][text[i]] for i in range(len(text)))
            / len(text) ** length_penalty
            for text in texts
        }
        assert tokens == padded(max(scores, key=scores.get), size)


@pytest.mark.slow
def test_beams_keep_keys_and_values_of_their_tokens(tiny):
    options = {"beams": 3, "length_penalty": 1.0, "max_tokens": 7}
    for prompt, tokens in zip(PROMPTS, generated(tiny, **options), strict=True):
        _, expected = reference_search(
            lambda before, prompt=prompt: whole_logits(tiny, [*prompt, *before]), **options
        )
        assert tokens == padded(expected, 7)


@pytest.mark.slow
def test_greedy_text_matches_full_forward_pass(tiny):
    found = generated(tiny, beams=1, length_penalty=1.0, max_tokens=8)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = []
        while len(expected) < 8 and END not in expected:
            expected.append(int(np.argmax(whole_logits(tiny, [*prompt, *expected]))))
        assert tokens == padded(expected, 8)


def test_scores_match_hand_computed_values():
    pytest.importorskip("sacrebleu")
    same = ["The Mill is cheap , and near the river ."]
    perfect = {"test_bleu": pytest.approx(100), "test_rouge_l": pytest.approx(100)}
    assert generation.scores([same[0].lower()], [["something else", *same]]) == perfect
    texts = ["the cat sat on the mat", "a dog ran"]
    references = [["the cat sat on a mat", "a cat sat on the mat"], ["a dog ran away now"]]
    # Of nine words, eight occur in a reference ("the" occurs once); all longer n-grams occur. The
    # references closest in length have 6 + 5 words.
    bleu = 100 * np.exp(1 - 11 / 9) * (8 / 9) ** 0.25
    # Five of six words in order in either reference; all of the text, and 3 of 5 words.
    rouge = 100 * (5 / 6 + 2 * 0.6 / 1.6) / 2
    expected = {"test_bleu": pytest.approx(bleu), "test_rouge_l": pytest.approx(rouge)}
    assert generation.scores(texts, references) == expected
    assert generation.scores(["", "x"], references)["test_rouge_l"] == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    pytest.importorskip("sacrebleu")
    folder = tmp_path_factory.mktemp("texts")
    write_published_model(folder / "gpt2", encoder=False)
    write_dart(folder / "dart")
    write_e2e(folder / "e2e")
    lines = (folder / "e2e" / "devset.csv").read_text(encoding="utf-8").splitlines()
    again = lines[2].rsplit(",", 1)[0] + ',"Again the food"'
    (folder / "e2e" / "devset.csv").write_text("\n".join([*lines, again, ""]), encoding="utf-8")
    return folder


def config_for(folder, **changes):
    fields = {
        "dataset": "e2e",
        "data_dir": folder,
        "model": "gpt2",
        "pretrained": folder / "gpt2",
        "sequence_length": 32,
        "batch_size": 4,
        "noise_multiplier": 1.0,
        "seed": 0,
        **changes,
    }
    return ExperimentConfig(**fields)


SEARCH = generation.Search(beams=2, max_new_tokens=6)


def test_references_are_grouped_by_source(folder):
    tokens = Tokens(folder / "gpt2", 32)
    e2e = load_published("e2e", folder, tokens)
    assert [len(references) for _, references in e2e.texts] == [1, 2, 1, 1, 1, 1]
    assert e2e.texts[1][0].startswith("name : ")
    assert e2e.texts[1][1][1] == "Again the food"
    assert len(e2e.test["inputs"]) == 7
    dart = load_published("dart", folder, tokens)
    assert [len(references) for _, references in dart.texts] == [2, 2, 2]
    # Generation starts at the position where targets start in training.
    prompts, lengths = tokens.prompts([source for source, _ in dart.texts])
    for row, length, inputs, labels in zip(
        prompts, lengths, dart.test["inputs"][::2], dart.test["labels"][::2], strict=True
    ):
        start = np.flatnonzero(labels != NO_LABEL)[0] + 1
        assert row[length - 1] == inputs[start - 1] == tokens.end
        if start == length:  # otherwise the row cuts the source to fit its target
            np.testing.assert_array_equal(row[:length], inputs[:start])


@pytest.mark.slow
def test_texts_do_not_depend_on_microbatch_size(folder):
    config = config_for(folder)
    dataset = config.data().load()
    model = config.build_model(0)
    start = config.initial_variables(model, dataset.train["inputs"][0], jax.random.key(0))
    found = []
    for size in (None, 4):  # six sources are not a multiple of four
        changed = dataclasses.replace(config, microbatch_size=size)
        found.append(generation.Generation(changed, SEARCH, model, dataset)(*start))
    assert found[0] == found[1]
    assert [entry["references"] for entry in found[0][1]] == [list(r) for _, r in dataset.texts]


@pytest.mark.slow
def test_trains_plans_and_scores_a_run(folder, tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        "from experiments.config import ExperimentConfig\n"
        "def get_config():\n    return ExperimentConfig(dataset='dart', model='gpt2', "
        "epsilon=None, noise_multiplier=1.0, accountant='rdp', delta=1e-3, batch_size=4, steps=2, "
        "sequence_length=32, microbatch_size=2, lora_rank=2)\n"
    )
    workdir = tmp_path / "run"
    options = ["--data-dir", str(folder), "--pretrained", str(folder / "gpt2")]
    options += ["--workdir", str(workdir)]
    search = ["--beams", "3", "--max-new-tokens", "8"]
    assert experiment(["generate", str(path), *options, *search]) == 2
    assert "Train the config first." in capsys.readouterr().err
    assert main(["train", str(path), *options]) == 0
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["test_perplexity"] == pytest.approx(np.exp(summary["test_loss"]), rel=1e-6)
    assert f"test perplexity {summary['test_perplexity']:.2f}" in capsys.readouterr().out
    config = dataclasses.replace(load_config(path), data_dir=folder, pretrained=folder / "gpt2")
    assert " frozen, " in planning.text("dart", planning.plan_run(config, count_flops=False))
    assert experiment(["generate", str(path), *options, *search]) == 0
    scores = json.loads((workdir / "scores.json").read_text())
    assert (scores["beams"], scores["max_new_tokens"]) == (3, 8)
    captured = capsys.readouterr()
    assert "BLEU {test_bleu:.2f} %, ROUGE-L {test_rouge_l:.2f} %".format(**scores) in captured.out
    lines = (workdir / "generated.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert f"texts: {len(rows)}/{len(rows)}" in captured.err
    texts, references = ([row[name] for row in rows] for name in ("text", "references"))
    again = generation.scores(texts, references)
    assert again == {name: pytest.approx(scores[name]) for name in again}


@pytest.mark.slow
def test_refuses_bad_generation_settings(folder, monkeypatch):
    config = config_for(folder)
    model, dataset = config.build_model(0), config.data().load()
    digits = ExperimentConfig().data().load()
    with pytest.raises(ConfigError, match=r"must have sources and references .* got 'digits'"):
        generation.Generation(config, SEARCH, model, digits)
    long = dataclasses.replace(SEARCH, max_new_tokens=120)
    with pytest.raises(ConfigError, match=r"`max_new_tokens` must be .* 128 positions .* got 120"):
        generation.Generation(config, long, model, dataset)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ConfigError, match=r"rouge_score, .*uv sync"):
        generation.Generation(config, SEARCH, model, dataset)
    for changes in ({"beams": 0}, {"length_penalty": -0.5}, {"max_new_tokens": 0}):
        (name,) = changes
        with pytest.raises(ConfigError, match=rf"`{name}` must be .*at least"):
            generation.Search(**changes)
