"""Generates texts for held-out sources with a trained decoder, and scores them."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from dpoptax.training import ConfigError, Dataset
from dpoptax.training.bars import Bar
from dpoptax.training.models import Variables
from dpoptax.training.run import records
from experiments.config import ExperimentConfig
from experiments.data.published_data import TextDataset
from experiments.generation.beam_search import beam_search

_CHUNK = 16  # sources per batch if the config has no micro-batches


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of beam search.

    Attributes:
        beams: Number of beams; 1 is greedy.
        length_penalty: Beams are ranked by log-probability / tokens ** length_penalty.
        max_new_tokens: Number of tokens after which a text is cut.
    """

    beams: int = 5
    length_penalty: float = 1.0
    max_new_tokens: int = 100

    def __post_init__(self) -> None:
        records.check_count("beams", self.beams)
        records.check_count("max_new_tokens", self.max_new_tokens)
        if not 0 <= self.length_penalty < float("inf"):
            raise ConfigError(
                f"`length_penalty` must be finite and at least 0, got {self.length_penalty}."
            )


def score_run(
    config: ExperimentConfig, workdir: Path, search: Search, *, progress: bool = True
) -> dict[str, float]:
    """Generates texts with the parameters of a finished run and scores them.

    Writes generated.jsonl, with the text and the references of each source, and scores.json to
    `workdir`.

    Args:
        config: Config of the run.
        workdir: Directory of the run.
        search: Options of the search.
        progress: Whether to show a progress bar.

    Returns:
        The scores in %.

    Raises:
        ConfigError: The run is not finished, or as for `Generation`.
    """
    path = workdir / "params.msgpack"
    if not path.is_file():
        raise ConfigError(
            f"`workdir` must contain params.msgpack of a finished run, got {str(workdir)!r}. Train "
            "the config first."
        )
    dataset = config.data(progress=progress).load()
    model = config.build_model(dataset.num_classes)
    generate = Generation(config, search, model, dataset)
    inputs = jnp.zeros(config.sequence_length, jnp.int32)
    variables = config.initial_variables(model, inputs, jax.random.key(0))
    params = serialization.from_bytes(variables.params, path.read_bytes())
    scored, generated = generate(params, variables.frozen, progress=progress)
    lines = "".join(json.dumps(entry) + "\n" for entry in generated)
    (workdir / "generated.jsonl").write_text(lines, encoding="utf-8")
    records.write_json(workdir / "scores.json", {**scored, **dataclasses.asdict(search)})
    return scored


class Generation:
    """Generates a text for every source of a test split, and scores them.

    Texts and scores are functions of released parameters and of the test split, which is assumed to
    be public. They cost the training examples no privacy, and ε does not cover the test split.

    Args:
        config: Config of the run.
        search: Options of the search.
        model: The decoder.
        dataset: A data set with the texts of its test split.

    Raises:
        ConfigError: The data set has no such texts, a library is not installed, or the model has
            too few positions.
    """

    def __init__(
        self, config: ExperimentConfig, search: Search, model: Any, dataset: Dataset
    ) -> None:
        if not isinstance(dataset, TextDataset):
            raise ConfigError(
                "`dataset` must have sources and references to generate texts, got "
                f"{dataset.name!r}. Use e2e or dart."
            )
        _libraries()
        self._tokens = config.tokens
        self._sources = [source for source, _ in dataset.texts]
        self._references = [references for _, references in dataset.texts]
        self._prompts, self._lengths = config.tokens.prompts(self._sources)
        longest, positions = self._prompts.shape[1], model.positions
        if longest + search.max_new_tokens > positions:
            raise ConfigError(
                f"`max_new_tokens` must be at most {positions - longest}, because "
                f"model={config.model!r} has {positions} positions and sources take up to "
                f"{longest}, got {search.max_new_tokens}."
            )
        self._chunk = min(config.microbatch_size or _CHUNK, len(self._sources))
        self._generate = _generator(
            model, search.beams, search.length_penalty, search.max_new_tokens, self._tokens.end
        )

    def __call__(
        self, params: Any, frozen: Any, *, progress: bool = False
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns scores in %, and each source with its text and its references."""
        texts: list[str] = []
        # Use one device of each process, wherever the parameters are.
        whole = jax.device_get(Variables(params, frozen))
        variables = jax.device_put(whole, jax.local_devices()[0])
        total = len(self._sources)
        with Bar(total=total, desc="texts", unit="text", leave=None, disable=not progress) as bar:
            for start in range(0, total, self._chunk):
                # The last chunk is padded, so that one shape is compiled once.
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
    """Computes BLEU and ROUGE-L, in %, of texts with any number of references each.

    BLEU is corpus BLEU by sacrebleu, with n-grams up to 4 and the tokens of mteval-v13a, ignoring
    case, as in the E2E challenge. ROUGE-L is the mean over texts of the largest F1 over references,
    by rouge-score without stemming. The challenge's tool maximizes precision and recall separately
    and gives recall more weight, so its numbers differ.

    Raises:
        ConfigError: A library is not installed.
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


def _apply_from(
    model: nn.Module, variables: Variables, inputs: jax.Array, past: Any, position: Any
) -> tuple[jax.Array, Any]:
    """Returns the logits of the tokens from `position` on, and the extended `past`."""
    frozen = {"frozen": variables.frozen} if variables.frozen else {}
    result: Any = model.apply({"params": variables.params, **frozen}, inputs, past, position)
    return result


def _empty_past(model: Any, room: int) -> Any:
    """Returns the argument `past` of `_apply_from` before the first of `room` tokens."""
    zeros = jnp.zeros((room, model.width))
    return tuple((zeros, zeros) for _ in range(model.depth))


@functools.lru_cache
def _generator(
    model: nn.Module, beams: int, length_penalty: float, max_tokens: int, end: int
) -> Any:
    """Returns the compiled `generate(variables, prompts (N, P), lengths (N,))`."""

    def generate(variables: Variables, prompts: jax.Array, lengths: jax.Array) -> Any:
        def one(prompt: jax.Array, length: jax.Array) -> jax.Array:
            read = functools.partial(_apply_from, model, variables)

            def step(tokens: jax.Array, past: Any, count: jax.Array) -> tuple[jax.Array, Any]:
                logits, past = jax.vmap(read, (0, 0, None))(tokens[:, None], past, length + count)
                return logits[:, 0], past

            room = _empty_past(model, len(prompt) + max_tokens)
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
            f"BLEU and ROUGE-L need {error.name}, which is not installed. Run `uv sync`."
        ) from error
    return bleu, rouge_scorer
