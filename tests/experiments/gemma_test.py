"""Tests the recipe for Gemma 3 270M without its weights and without tunix."""

import importlib.util

import numpy as np
import pytest

from experiments.command_line import main
from experiments.gemma import weights
from experiments.gemma.tokenizer import START, Tokenizer

PIECES = ["a", "b", "c", "▁", "ab", "bc", "▁a", "abc", "<0xC3>", "<0xA9>"]
# Scores of merged pieces fall in the order in which they are merged.
SCORES = [0.0] * 4 + [-2.0, -1.0, -3.0, -4.0, 0.0, 0.0]


def tokenize(text):
    numbers = {piece: i + 10 for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(numbers, {i + 10: score for i, score in enumerate(SCORES)})
    first, *found = tokenizer.encode(text)
    assert first == START
    return [PIECES[i - 10] for i in found]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("abc", ["abc"]),  # first b and c, then a
        ("ab", ["ab"]),
        (" abb", ["▁", "ab", "b"]),  # -2 before -3
        ("bcbc", ["bc", "bc"]),
        ("aé", ["a", "<0xC3>", "<0xA9>"]),
    ],
)
def test_merges_the_pair_with_the_highest_score(text, pieces):
    assert tokenize(text) == pieces


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


@pytest.mark.skipif(importlib.util.find_spec("tunix") is not None, reason="tunix is installed")
def test_command_names_the_missing_library(capsys):
    assert main(["language", "--data-dir", ".", "--output", "x.md"]) == 2
    assert "needs tunix" in capsys.readouterr().err
