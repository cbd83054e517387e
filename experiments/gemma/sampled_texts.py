"""Samples public texts from Gemma 3 270M, `python -m experiments sampled-texts`."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.errors import ConfigError
from experiments.gemma import weights
from experiments.gemma.tokenizer import Tokenizer
from experiments.text.texts import TOPICS

_COMMAND = "sampled-texts"
PROMPTS = {
    "World": "World news in brief, two sentences. Nations, governments and conflicts:\n\n- ",
    "Sports": "Sports news in brief, two sentences. Teams, matches and athletes:\n\n- ",
    "Business": "Business news in brief, two sentences. Companies, markets and prices:\n\n- ",
    "Sci/Tech": "Science and technology news in brief, two sentences. Research, software and "
    "devices:\n\n- ",
}
"""A prompt for each topic, which reads no private text."""


def run(
    *,
    output: Path,
    texts: int = 1600,
    length: int = 48,
    batch_size: int = 80,
    temperature: float = 1.0,
    top_k: int = 64,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Samples texts on each topic of AG News from Gemma 3 270M, a public model.

    Args:
        output: The file, with a text and the topic of its prompt in each line.
        texts: Number of texts.
        length: Tokens per text.
        batch_size: Number of texts that are sampled together.
        temperature: Temperature of the samples.
        top_k: Number of the likeliest tokens that are drawn from.
        top_p: Their least probability together.
        seed: Seed of the samples.
    """
    reader = weights.open_file("tunix", _COMMAND)
    sample = _sampler(weights.read_tokenizer(reader), weights.read_weights(reader), length)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    rows: list[tuple[str, str]] = []
    with Bar(total=texts, desc=_COMMAND, unit="text") as bar:
        for number, topic in enumerate(itertools.cycle(TOPICS)):
            if len(rows) >= texts:
                break
            found = sample([PROMPTS[topic]] * batch_size, length, seed=seed + number, **options)
            rows += [(text, topic) for text in first_paragraphs(found.text)][: texts - len(rows)]
            bar.update(len(rows) - bar.n)
    with output.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)
    return f"Written to {output}: {len(rows):,} texts"


def first_paragraphs(texts: list[str]) -> Iterator[str]:
    """Yields the first paragraph of each text that has at least five words."""
    for text in texts:
        paragraph = " ".join(text.strip().partition("\n")[0].split())
        if len(paragraph.split()) >= 5:
            yield paragraph


def _sampler(tokenizer: Tokenizer, parameters: dict[str, np.ndarray], length: int) -> Any:
    """Returns tunix's sampler, which keeps the keys and values of earlier tokens."""
    try:
        from tunix.generate.sampler import CacheConfig, Sampler

        from experiments.gemma.tunix_run import base_model
    except ImportError as error:
        command = weights.command("tunix", _COMMAND)
        raise ConfigError(f"`{_COMMAND}` needs tunix: {error}. Run `{command}`.") from error
    model = base_model(jnp.float32, parameters)
    prompts = max(len(tokenizer.encode(prompt)) for prompt in PROMPTS.values())
    cache = CacheConfig(2 * prompts + length, weights.LAYERS, 1, weights.HEAD_SIZE)
    return Sampler(model, tokenizer, cache)
