"""Tests the recipe for Gemma 3 270M without its weights and without a trainer."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command_line import main
from experiments.gemma import weights
from experiments.gemma.fine_tuning import TITLES, replace_section
from experiments.gemma.problem import (
    LanguageArguments,
    Scores,
    make_canaries,
    make_plan,
    make_rows,
    plain_batches,
)
from experiments.gemma.sampled_texts import first_paragraphs
from experiments.gemma.tokenizer import END, PADDING, START, Tokenizer

PIECES = ["a", "b", "c", "▁", "ab", "bc", "▁a", "abc", "<0xC3>", "<0xA9>"]
# Scores of merged pieces fall in the order in which they are merged.
SCORES = [0.0] * 4 + [-2.0, -1.0, -3.0, -4.0, 0.0, 0.0]


def make_tokenizer():
    numbers = {piece: i + 10 for i, piece in enumerate(PIECES)}
    return Tokenizer(numbers, {i + 10: score for i, score in enumerate(SCORES)})


def tokenize(text):
    first, *found = make_tokenizer().encode(text)
    assert first == START
    return [PIECES[i - 10] for i in found]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("abc", ["abc"]),  # first b and c, then a
        ("ab", ["ab"]),
        (" abb", ["▁", "ab", "b"]),  # -2 before -3
        ("bc  bc ", ["bc", "▁", "▁", "bc", "▁"]),
        ("bcbc", ["bc", "bc"]),
        ("aé", ["a", "<0xC3>", "<0xA9>"]),
    ],
)
def test_merges_the_pair_with_the_highest_score(text, pieces):
    assert tokenize(text) == pieces
    tokenizer = make_tokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), END, PADDING]) == text


def test_merges_across_the_space_inside_of_a_piece():
    pieces = [">", "<", "/", "▁", "</", "▁</", ">▁</"]
    numbers = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(numbers, {i: -float(i) for i in range(len(pieces))})
    assert tokenizer.encode("> </") == [START, numbers[">▁</"]]


def test_sampled_texts_are_first_paragraphs_of_five_words():
    found = [" Rates  rise in two countries.\nMore.", "Too short.\nThen a text of six words.", ""]
    assert list(first_paragraphs(found)) == ["Rates rise in two countries."]


def make_file(rng):
    """Returns small arrays under the names and in the layouts of the file."""
    wide, narrow, hidden = weights.HEADS * weights.HEAD_SIZE, weights.HEAD_SIZE, 6
    kernels = {
        "attn_q": (wide, 5), "attn_k": (narrow, 5), "attn_v": (narrow, 5),
        "attn_output": (5, wide), "ffn_gate": (hidden, 5), "ffn_up": (hidden, 5),
        "ffn_down": (5, hidden), "attn_norm": (5,), "post_attention_norm": (5,),
        "ffn_norm": (5,), "post_ffw_norm": (5,), "attn_q_norm": (narrow,),
        "attn_k_norm": (narrow,),
    }  # fmt: skip
    found = {"token_embd.weight": rng.normal(size=(7, 5)), "output_norm.weight": np.ones(5)}
    for i in range(weights.LAYERS):
        found |= {f"blk.{i}.{name}.weight": rng.normal(size=kernels[name]) for name in kernels}
    return found


def test_arranges_kernels_for_the_model_of_tunix():
    rng = np.random.default_rng(0)
    file = make_file(rng)
    found = dict(weights._arranged(file))
    assert sum(x.size for x in found.values()) == sum(x.size for x in file.values())
    x, last = rng.normal(size=(3, 5)), weights.LAYERS - 1
    heads = (3, weights.HEADS, weights.HEAD_SIZE)
    query = np.einsum("td,ndh->tnh", x, found[f"layers.{last}.attn.q_einsum.w"])
    want = (x @ file[f"blk.{last}.attn_q.weight"].T).reshape(heads)
    np.testing.assert_allclose(query, want)
    value = np.einsum("td,kdh->tkh", x, found[f"layers.{last}.attn.kv_einsum.w"][1])[:, 0]
    np.testing.assert_allclose(value, x @ file[f"blk.{last}.attn_v.weight"].T)
    mixed = np.einsum("tnh,nhd->td", query, found[f"layers.{last}.attn.attn_vec_einsum.w"])
    np.testing.assert_allclose(
        mixed, query.reshape(3, -1) @ file[f"blk.{last}.attn_output.weight"].T
    )
    np.testing.assert_allclose(found["layers.0.mlp.up_proj.kernel"], file["blk.0.ffn_up.weight"].T)
    np.testing.assert_array_equal(found["final_norm.scale"], np.zeros(5))


def test_renames_parameters_for_the_model_of_gemma():
    rng = np.random.default_rng(0)
    file = make_file(rng)
    found = dict(weights.renamed(dict(weights._arranged(file))))
    assert sum(x.size for x in found.values()) == sum(x.size for x in file.values())
    x, last = rng.normal(size=(3, 5)), weights.LAYERS - 1
    gate = np.einsum("tf,nhf->tnh", x, found[f"layer_{last}/mlp/gating_einsum"])
    np.testing.assert_allclose(gate[:, 0], x @ file[f"blk.{last}.ffn_gate.weight"].T)
    np.testing.assert_allclose(gate[:, 1], x @ file[f"blk.{last}.ffn_up.weight"].T)
    np.testing.assert_array_equal(found["layer_0/mlp/linear"], file["blk.0.ffn_down.weight"].T)
    np.testing.assert_array_equal(found["embedder/input_embedding"], file["token_embd.weight"])
    assert "layer_0/attn/_query_norm/scale" in found


def make_settings(**options):
    return LanguageArguments(data_dir=None, output=None, delta=1e-3, **options)


def test_plants_half_of_the_canaries():
    texts, planted = make_canaries(20, seed=0)
    assert len(set(texts)) == 20
    assert planted.sum() == 10
    again, other = make_canaries(20, seed=1)
    assert again != texts
    assert (other != planted).any()


def test_rows_are_cut_and_padded():
    rows = make_rows(make_tokenizer(), ["a", "a c c c"], 4)
    assert rows[0].tolist() == [START, 10, PADDING, PADDING]
    assert rows[1].tolist() == [START, 10, 13, 12]


def test_plan_cuts_batches_and_spends_epsilon():
    given = make_settings(batch_size=10, max_batch_size=16, steps=5)
    plan = make_plan(given, 100, 3.0)
    assert plan.sampler.padded_size == 16
    assert 2.9 < plan.guarantee().epsilon(1e-3) <= 3.0
    first, second = (next(plan.new_run().draws())[1] for _ in range(2))
    assert not np.array_equal(first, second)


def test_parts_of_plain_batches_hold_each_text_of_the_batch():
    given = make_settings(batch_size=10, microbatch_size=4, steps=2)
    plan, tokens = make_plan(given, 30, 0.0), np.arange(60).reshape(30, 2)
    number, parts = plain_batches(given, plan, tokens)
    parts = list(parts)
    assert number == 3
    assert [len(part) for part in parts] == [4, 3, 3] * 2
    _, (_, drawn, _) = plan.new_run(jax.random.key(given.seed)).draws()
    np.testing.assert_array_equal(np.concatenate(parts[3:]), tokens[drawn])


def test_perplexity_leaves_padding_out():
    words = 8
    biased = jnp.zeros(words).at[3].set(1.0)

    def logits(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, words))

    scores = Scores(logits, size=2)
    tokens = np.array([[START, 5, 6], [START, 5, PADDING], [START, 3, PADDING]])
    assert scores.perplexity(jnp.zeros(words), tokens) == pytest.approx(words)
    total = np.log(words - 1 + np.e)
    np.testing.assert_allclose(scores.losses(biased, tokens), [2 * total, total, total - 1], 1e-6)


def test_replaces_the_section_of_a_trainer():
    page = replace_section("# T\n\n", "tunix", "\none\n")
    page = replace_section(page, "Kauldron", "two")
    assert page == "# T\n\n## tunix\n\none\n\n## Kauldron\n\ntwo\n"
    changed = replace_section(page, "tunix", "### three")
    assert changed == "# T\n\n## tunix\n\n### three\n\n## Kauldron\n\ntwo\n"


@pytest.mark.parametrize("trainer", ["tunix", "kauldron"])
def test_command_names_the_missing_library(trainer, capsys):
    if importlib.util.find_spec(trainer) is not None:
        pytest.skip(f"{trainer} is installed")
    options = ["--data-dir", ".", "--output", "x.md", "--trainer", trainer]
    assert main(["language", *options]) == 2
    shown = capsys.readouterr().err
    assert f"`language` needs {TITLES[trainer]}: No module named" in shown
    assert f"--group {trainer}" in shown
