"""Defines the fine-tuning of Gemma 3 270M on news: settings, texts, canaries, and scores."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.sampling import FixedSizeSampler, PoissonSampler
from dpoptax.training.bars import Bar
from experiments.gemma.tokenizer import PADDING, Tokenizer
from experiments.text.texts import Texts


@dataclasses.dataclass(frozen=True)
class LanguageArguments:
    """Fine-tunes Gemma 3 270M on news with LoRA, with and without privacy.

    Attributes:
        data_dir: Folder with agnews_dev.tsv and agnews_test.tsv, or the same files in .xz.
        output: The Markdown file. The command replaces the section of the trainer.
        factors: Folder for the LoRA factors after each training, which
            `dpoptax.training.load_params` reads.
        trainer: The library that trains. Each needs its own environment.
        epsilons: Values of ε; 0 trains without privacy.
        examples: Number of training texts, in addition to the planted ones.
        canaries: Number of invented texts. Half of them, chosen at random, are planted.
        held_out: Number of texts whose perplexity is measured.
        length: Tokens per text. Longer texts are cut.
        batch_size: Expected number of texts in a step.
        max_batch_size: Larger batches are cut to this size, which ε includes. All batches are
            padded to it. By default, one in 10^12 is cut.
        steps: Number of steps.
        rank: Rank of LoRA.
        layers: Number of the last layers that have LoRA.
        learning_rate: Learning rate of Adam.
        clip: Bound of the norm of an example's gradient.
        microbatch_size: Number of texts of which gradients are computed at once, with privacy.
        delta: δ of the guarantee.
        dtype: Dtype of the published weights and of activations. LoRA is float32.
        seed: Seed of the model, the canaries and, without privacy, of the batches.
    """

    data_dir: Path
    output: Path
    factors: Path = Path("runs/language")
    trainer: Literal["tunix", "kauldron"] = "tunix"
    epsilons: tuple[float, ...] = (3.0, 8.0, 0.0)
    examples: int = 10_000
    canaries: int = 200
    held_out: int = 200
    length: int = 64
    batch_size: int = 256
    max_batch_size: int | None = None
    steps: int = 100
    rank: int = 8
    layers: int = 18
    learning_rate: float = 1e-3
    clip: float = 1.0
    microbatch_size: int | None = None
    delta: float = 1e-5
    dtype: str = "float32"
    seed: int = 0


class Network(Protocol):
    """A pretrained model in one trainer, with LoRA.

    Attributes:
        trained: Number of trained numbers.
    """

    trained: int

    @property
    def params(self) -> Any:
        """The parameters, after the last training if there was one."""

    @property
    def factors(self) -> Any:
        """The LoRA factors among them, a tree of dicts."""

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the logits of the token after each of `tokens`, (texts, length)."""

    def train(
        self, plan: dpoptax.PrivacyPlan, tokens: np.ndarray, *, private: bool
    ) -> Guarantee | None:
        """Trains new LoRA factors, and returns the guarantee."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tokens of all texts, (texts, length), with padding at the end.

    Attributes:
        rows: The training texts, with the planted canaries at the end.
        held_out: Other texts.
        canaries: All canaries.
        planted: Whether each canary is a training text.
    """

    rows: np.ndarray
    held_out: np.ndarray
    canaries: np.ndarray
    planted: np.ndarray


def make_problem(given: LanguageArguments, tokenizer: Tokenizer, news: Texts) -> Problem:
    """Returns the tokens of news and canaries."""
    canaries, planted = make_canaries(given.canaries, given.seed)
    texts = list(news.texts[: given.examples])
    texts += [text for text, chosen in zip(canaries, planted, strict=True) if chosen]
    held_out = news.test_texts[: given.held_out]
    rows, others, invented = (
        make_rows(tokenizer, each, given.length) for each in (texts, held_out, canaries)
    )
    return Problem(rows, others, invented, planted)


def make_canaries(number: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Returns invented texts with random digits, and whether each is planted."""
    rng = np.random.default_rng(seed)
    accounts = rng.permutation(9000)[:number] + 1000
    codes = rng.integers(10**11, 10**12, number)
    texts = [
        f"The access code of account {a} is {c}." for a, c in zip(accounts, codes, strict=True)
    ]
    return texts, rng.permutation(number) < number // 2


def make_rows(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> np.ndarray:
    """Returns the tokens of texts, cut or padded to a length."""
    tokens = np.full((len(texts), length), PADDING, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        found = tokenizer.encode(text)[:length]
        row[: len(found)] = found
    return tokens


def make_plan(given: LanguageArguments, size: int, epsilon: float) -> dpoptax.PrivacyPlan:
    """Returns the plan of a run. Without privacy (ε = 0), it only has batches of a fixed size."""
    run: dict[str, Any] = {
        "dataset_size": size,
        "batch_size": given.batch_size,
        "steps": given.steps,
        "delta": given.delta,
    }
    if not epsilon:
        return dpoptax.PrivacyPlan(**run, noise_multiplier=1.0, sampler=FixedSizeSampler)
    cut = functools.partial(PoissonSampler, max_batch_size=given.max_batch_size)
    return dpoptax.PrivacyPlan(**run, epsilon=epsilon, sampler=cut)


def plain_batches(
    given: LanguageArguments, plan: dpoptax.PrivacyPlan, tokens: np.ndarray
) -> tuple[int, Iterator[np.ndarray]]:
    """Returns the batches of training without privacy, in parts that fit into memory.

    It returns the number of parts of each batch, and an iterator over the parts of all batches. The
    trainer accumulates their gradients.
    """
    parts = math.ceil(given.batch_size / (given.microbatch_size or given.batch_size))
    run = plan.new_run(jax.random.key(given.seed))
    batches = (batch.examples for batch in run.batches(tokens))
    return parts, itertools.chain.from_iterable(np.array_split(x, parts) for x in batches)


class Scores:
    """Scores texts by a model.

    Args:
        logits: Returns logits, as `Network.logits`.
        size: Number of texts that are scored together.
    """

    def __init__(self, logits: Callable[[Any, jax.Array], jax.Array], size: int = 4) -> None:
        def score(params: Any, tokens: jax.Array) -> jax.Array:
            found = jax.nn.log_softmax(logits(params, tokens)[:, :-1].astype(jnp.float32))
            taken = jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]
            return -jnp.sum(taken, 1, where=tokens[:, 1:] != PADDING)

        self._size, self._score = size, jax.jit(score)

    def losses(self, params: Any, tokens: np.ndarray) -> np.ndarray:
        """Returns the negative log-likelihood of each text."""
        number, found = len(tokens), []
        for start in Bar(range(0, number, self._size), desc="scores", delay=1, leave=None):
            places = np.minimum(np.arange(start, start + self._size), number - 1)
            found.append(np.asarray(self._score(params, tokens[places])))
        return np.concatenate(found)[:number].astype(np.float64)

    def perplexity(self, params: Any, tokens: np.ndarray) -> float:
        """Returns exp of the mean negative log-likelihood of a token."""
        return math.exp(self.losses(params, tokens).sum() / (tokens[:, 1:] != PADDING).sum())
