"""Texts that a trained decoder generates for held-out sources, and BLEU and ROUGE-L of them."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.models import models
from dpoptax.training.run.decoding import beam_search

_CHUNK = 16  # sources at a time, where the config has no microbatches


class Generation:
    """Generates a text for every source of a test split, and scores them.

    What could fail is checked when it is made, before anything is trained. Texts and scores are
    functions of released parameters and of the test split, which is taken to be public: they cost
    the training examples no privacy, and ε does not cover the test split.

    Args:
        config: The run, with its beams.
        model: The decoder.
        dataset: With the texts of its test split.

    Raises:
        ConfigError: A data set without such texts, libraries that are not installed, or a model
            with too few positions.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, dataset: Dataset) -> None:
        if not dataset.texts:
            raise ConfigError(
                f"beams={config.beams} generates texts for the test split, and "
                f"dataset={dataset.name!r} has no sources and references there; leave it out"
            )
        _libraries()
        self._tokens, self._beams = config.tokens, config.beams
        self._sources = [source for source, _ in dataset.texts]
        self._references = [references for _, references in dataset.texts]
        self._prompts, self._lengths = config.tokens.prompts(self._sources)
        needed = self._prompts.shape[1] + config.max_new_tokens
        positions: int = model.positions
        if needed > positions:
            raise ConfigError(
                f"max_new_tokens={config.max_new_tokens} behind sources of up to "
                f"{self._prompts.shape[1]} tokens exceeds the {positions} positions of "
                f"model={config.model!r}; give at most {positions - self._prompts.shape[1]}"
            )
        self._chunk = min(config.microbatch_size or _CHUNK, len(self._sources))
        self._generate = _generator(
            model, config.beams, config.length_penalty, config.max_new_tokens, self._tokens.end
        )

    def __call__(
        self, params: Any, frozen: Any, *, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The scores of parameters, in %, and each source with its text and its references."""
        texts: list[str] = []
        # One device of each process, whatever the parameters are spread over.
        whole = jax.device_get(models.Variables(params, frozen))
        variables = jax.device_put(whole, jax.local_devices()[0])
        total = len(self._sources)
        with Bar(total=total, desc="texts", unit="text", leave=None, disable=not progress) as bar:
            for start in range(0, total, self._chunk):
                # The last chunk is filled up: one shape, compiled once.
                chosen = np.minimum(np.arange(start, start + self._chunk), total - 1)
                rows = self._generate(variables, self._prompts[chosen], self._lengths[chosen])
                texts += self._tokens.texts(np.asarray(rows)[: total - start])
                bar.update(min(self._chunk, total - start))
        rows = zip(self._sources, texts, self._references, strict=True)
        generated = [
            {"source": source, "text": text, "references": list(references)}
            for source, text, references in rows
        ]
        return scores(texts, self._references), generated


def scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU and ROUGE-L, in %, of texts with any number of references each.

    BLEU is that of the corpus, by sacrebleu: n-grams up to 4, the tokens of mteval-v13a, without
    case, as the E2E challenge counts it. ROUGE-L is the mean over texts of the largest F1 over
    references, by rouge-score, without stemming; the challenge's own tool takes the largest
    precision and recall apart and weights recall more, which gives other numbers.

    Raises:
        ConfigError: A library that is not installed.
    """
    bleu, rouge = _libraries()
    longest = max(map(len, references))
    streams = [[each[i] if i < len(each) else None for each in references] for i in range(longest)]
    scorer = rouge.RougeScorer(["rougeL"])
    overlaps = [
        scorer.score_multi(list(each), text)["rougeL"].fmeasure
        for text, each in zip(texts, references, strict=True)
    ]
    return {
        "test_bleu": bleu.BLEU(lowercase=True).corpus_score(list(texts), streams).score,
        "test_rouge_l": 100 * float(np.mean(overlaps)),
    }


@functools.lru_cache
def _generator(
    model: nn.Module, beams: int, length_penalty: float, max_tokens: int, end: int
) -> Any:
    """`generate(variables, prompts (N, P), lengths (N,))`: token rows (N, max_tokens)."""

    def generate(variables: models.Variables, prompts: jax.Array, lengths: jax.Array) -> Any:
        def one(prompt: jax.Array, length: jax.Array) -> jax.Array:
            read = functools.partial(models.apply_from, model, variables)

            def step(tokens: jax.Array, past: Any, count: jax.Array) -> tuple[jax.Array, Any]:
                logits, past = jax.vmap(read, (0, 0, None))(tokens[:, None], past, length + count)
                return logits[:, 0], past

            room = models.empty_past(model, len(prompt) + max_tokens)
            logits, past = read(prompt, room, 0)
            return beam_search(
                step,
                logits[length - 1],
                past,
                end=end,
                beams=beams,
                length_penalty=length_penalty,
                max_tokens=max_tokens,
            )[0]

        return jax.vmap(one)(prompts, lengths)

    return jax.jit(generate)


def _libraries() -> tuple[Any, Any]:
    try:
        from rouge_score import rouge_scorer
        from sacrebleu.metrics import bleu
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"BLEU and ROUGE-L need {error.name}, which is not installed; "
            "pip install 'dpoptax[scores]'"
        ) from error
    return bleu, rouge_scorer
