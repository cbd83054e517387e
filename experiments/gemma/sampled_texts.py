"""Samples public texts from Gemma 3 270M, `python -m experiments sampled-texts`."""

import csv
import itertools
import re
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
_EXAMPLES = {
    "World": "Ministers of both countries met in Geneva on Tuesday to discuss a cease-fire along "
    "their border, officials said.",
    "Sports": "The goalkeeper saved two penalties on Sunday as her team reached the semifinals for "
    "the first time.",
    "Business": "Shares of the airline fell 4 percent after it warned that higher fuel prices "
    "would cut its quarterly profit.",
    "Sci/Tech": "Engineers presented a chip that needs half the power of earlier models and may "
    "appear in phones next year.",
}
"""Invented news, one for each topic. No private text is read."""
_TAG = re.compile("<[^<>]*>")


def prompt(topic: str) -> str:
    """Returns the invented news with their topics, and the topic of a text to write."""
    others = [name for name in _EXAMPLES if name != topic]
    shown = "".join(f"{name}: {_EXAMPLES[name]}\n\n" for name in (*others, topic))
    return f"Short news by topic.\n\n{shown}{topic}:"


def run(
    *,
    output: Path,
    texts: int = 1600,
    length: int = 48,
    batch_size: int = 80,
    seed: int = 0,
) -> str:
    """Samples texts on each topic of AG News from Gemma 3 270M, a public model.

    Args:
        output: The file, with a text and the topic of its prompt in each line.
        texts: Number of texts.
        length: Tokens per text.
        batch_size: Number of texts that are sampled together.
        seed: Seed of the samples.
    """
    reader = weights.open_file("tunix", _COMMAND)
    sample = _sampler(weights.read_tokenizer(reader), weights.read_weights(reader), length)
    options = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    rows: list[tuple[str, str]] = []
    with Bar(total=texts, desc=_COMMAND, unit="text") as bar:
        for number, topic in enumerate(itertools.cycle(TOPICS)):
            if len(rows) >= texts:
                break
            found = sample([prompt(topic)] * batch_size, length, seed=seed + number, **options)
            rows += [(text, topic) for text in first_paragraphs(found.text)][: texts - len(rows)]
            bar.update(len(rows) - bar.n)
    with output.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)
    return f"Written to {output}: {len(rows):,} texts"


def first_paragraphs(texts: list[str]) -> Iterator[str]:
    """Yields the first paragraph of each text, without tags, if it has at least five words."""
    for text in texts:
        paragraph = " ".join(_TAG.sub("", text.strip().partition("\n")[0]).split())
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
    prompts = max(len(tokenizer.encode(prompt(topic))) for topic in TOPICS)
    cache = CacheConfig(2 * prompts + length, weights.LAYERS, 1, weights.HEAD_SIZE)
    return Sampler(model, tokenizer, cache)
