"""Measures private LoRA in Gemma 3 270M on news, with tunix."""

import dataclasses
import datetime
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.sft import peft_trainer, utils

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.auditing import MembershipReport, membership_report
from dpoptax.integrations.tunix import PrivateTrainer, guarantee, plan_batches
from dpoptax.training.run.records import markdown_table
from experiments.gemma import weights
from experiments.gemma.tokenizer import PADDING, Tokenizer
from experiments.text.texts import read_texts


@dataclasses.dataclass(frozen=True)
class LanguageArguments:
    """Fine-tunes Gemma 3 270M on news with LoRA, with and without privacy.

    Attributes:
        data_dir: Folder with agnews_dev.tsv and agnews_test.tsv, or the same files in .xz.
        output: The Markdown file.
        epsilons: Values of ε; 0 trains without privacy.
        examples: Number of training texts, in addition to the planted ones.
        canaries: Number of invented texts. Half of them, chosen at random, are planted.
        held_out: Number of texts whose perplexity is measured.
        length: Tokens per text. Longer texts are cut.
        batch_size: Expected number of texts in a step.
        steps: Number of steps.
        rank: Rank of LoRA.
        layers: Number of the last layers that have LoRA.
        learning_rate: Learning rate of Adam.
        clip: Bound of the norm of an example's gradient.
        microbatch_size: Number of texts of which gradients are computed at once, with privacy.
        delta: δ of the guarantee.
        dtype: Dtype of parameters and activations.
        seed: Seed of the model, the canaries and, without privacy, of the batches.
    """

    data_dir: Path
    output: Path
    epsilons: tuple[float, ...] = (3.0, 8.0, 0.0)
    examples: int = 4000
    canaries: int = 200
    held_out: int = 200
    length: int = 64
    batch_size: int = 256
    steps: int = 100
    rank: int = 8
    layers: int = 18
    learning_rate: float = 1e-3
    clip: float = 1.0
    microbatch_size: int | None = None
    delta: float = 1e-5
    dtype: str = "float32"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one training.

    Attributes:
        perplexity: Perplexity of the held-out texts.
        report: The membership report on the canaries.
        guarantee: The guarantee; None without privacy.
        noise_multiplier: Its noise multiplier; 0 without privacy.
        minutes: Minutes of the training.
    """

    perplexity: float
    report: MembershipReport
    guarantee: Guarantee | None
    noise_multiplier: float
    minutes: float


def make_canaries(number: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Returns invented texts with random digits, and whether each is planted."""
    rng = np.random.default_rng(seed)
    accounts = rng.permutation(9000)[:number] + 1000
    codes = rng.integers(10**11, 10**12, number)
    texts = [
        f"The access code of account {a} is {c}." for a, c in zip(accounts, codes, strict=True)
    ]
    return texts, rng.permutation(number) < number // 2


def make_rows(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Any:
    """Returns the tokens of texts, cut or padded to a length."""
    tokens = np.full((len(texts), length), PADDING, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        found = tokenizer.encode(text)[:length]
        row[: len(found)] = found
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=tokens != PADDING)


def make_inputs(texts: Any) -> dict[str, Any]:
    """Returns the inputs of the model for a batch of texts."""
    return {
        "input_tokens": texts.input_tokens,
        "input_mask": texts.input_mask,
        "positions": utils.build_positions_from_mask(texts.input_mask),
        "attention_mask": utils.make_causal_attn_mask(texts.input_mask),
    }


def make_model(given: LanguageArguments, parameters: dict[str, np.ndarray]) -> nnx.Module:
    """Returns the pretrained model with LoRA in its last layers."""
    dtype = jnp.dtype(given.dtype)
    config = dataclasses.replace(gemma3.ModelConfig.gemma3_270m(), param_dtype=dtype)
    network = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(network)
    filled = {tuple(path.split(".")): x for path, x in parameters.items()}
    flat = {
        path: x.replace(jnp.asarray(filled.pop(tuple(map(str, path))), dtype))
        for path, x in nnx.to_flat_state(state)
    }
    if filled:
        raise ValueError(f"The model has no parameters {sorted(filled)}.")
    network = nnx.merge(graph, nnx.from_flat_state(flat))
    numbers = "|".join(map(str, range(weights.LAYERS - given.layers, weights.LAYERS)))
    provider = qwix.LoraProvider(
        module_path=rf"layers/({numbers})/.*(q_einsum|kv_einsum|attn_vec_einsum|_proj)",
        rank=given.rank,
        alpha=2.0 * given.rank,
    )
    text, seen = jnp.zeros((1, 16), int), jnp.ones((1, 16, 16), bool)
    rngs = nnx.Rngs(given.seed)
    return qwix.apply_lora_to_model(network, provider, text, text, None, seen, rngs=rngs)


class Scores:
    """Scores texts by a model.

    Args:
        model: The model, or one with the same structure.
        size: Number of texts that are scored together.
    """

    def __init__(self, model: nnx.Module, size: int = 4) -> None:
        graph = nnx.graphdef(model)
        self._size = size

        def score(state: Any, texts: Any) -> jax.Array:
            inputs = make_inputs(texts)
            tokens, real = inputs["input_tokens"], inputs.pop("input_mask")
            model = nnx.merge(graph, state)
            logits, _ = model(tokens, inputs["positions"], None, inputs["attention_mask"])
            found = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
            taken = jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]
            return -jnp.sum(taken * real[:, 1:], 1)

        self._score = jax.jit(score)

    def losses(self, model: nnx.Module, rows: Any) -> np.ndarray:
        """Returns the negative log-likelihood of each text."""
        state, number = nnx.state(model), len(rows.input_tokens)
        found = []
        for start in range(0, number, self._size):
            places = np.minimum(np.arange(start, start + self._size), number - 1)
            part = jax.tree.map(lambda x, places=places: x[places], rows)
            found.append(np.asarray(self._score(state, part)))
        return np.concatenate(found)[:number].astype(np.float64)

    def perplexity(self, model: nnx.Module, rows: Any) -> float:
        """Returns exp of the mean negative log-likelihood of a token."""
        return math.exp(self.losses(model, rows).sum() / rows.input_mask[:, 1:].sum())


def fine_tune(
    given: LanguageArguments, model: nnx.Module, rows: Any, epsilon: float
) -> tuple[Guarantee | None, float]:
    """Trains LoRA in `model`, and returns the guarantee and the noise multiplier."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=given.steps)
    size = len(rows.input_tokens)
    adam = optax.adam(given.learning_rate)
    run: dict[str, Any] = {
        "dataset_size": size,
        "batch_size": given.batch_size,
        "steps": given.steps,
    }
    if not epsilon:
        plan = dpoptax.PrivacyPlan(**run, noise_multiplier=1.0, seed=given.seed)
        trainer = peft_trainer.PeftTrainer(model, adam, config)
        trainer.with_gen_model_input_fn(make_inputs).train(_masked(plan, rows))
        return None, 0.0
    plan = dpoptax.PrivacyPlan(**run, epsilon=epsilon, delta=given.delta).new_run()
    chain = optax.chain(plan.noise(dpoptax.random_key_from_os(), clip=given.clip), adam)
    private = PrivateTrainer(
        model, chain, config, plan=plan, clip=given.clip, microbatch_size=given.microbatch_size
    )
    private.with_gen_model_input_fn(make_inputs).train(plan_batches(plan, rows))
    assert isinstance(plan.noise_multiplier, float)
    return guarantee(private), plan.noise_multiplier


def _masked(plan: dpoptax.PrivacyPlan, rows: Any) -> Iterator[Any]:
    """Yields the same batches for tunix's own trainer. Padding has no tokens that count."""
    for batch in plan.batches(rows):
        texts = batch.examples
        yield texts.replace(input_mask=texts.input_mask & np.asarray(batch.mask)[:, None])


def measure(given: LanguageArguments) -> str:
    """Trains at each ε, and returns the page."""
    reader = weights.open_file()
    tokenizer = weights.read_tokenizer(reader)
    canaries, planted = make_canaries(given.canaries, given.seed)
    news = read_texts("agnews", given.data_dir)
    texts = list(news.texts[: given.examples])
    texts += [text for text, chosen in zip(canaries, planted, strict=True) if chosen]
    rows = make_rows(tokenizer, texts, given.length)
    held_out = make_rows(tokenizer, news.test_texts[: given.held_out], given.length)
    canary_rows = make_rows(tokenizer, canaries, given.length)
    model = make_model(given, weights.read_weights(reader))
    untrained = jax.tree.map(np.asarray, nnx.state(model, nnx.LoRAParam))
    scores = Scores(model)
    before = scores.perplexity(model, held_out)
    losses = scores.losses(model, canary_rows)
    chance = membership_report(losses[planted], losses[~planted]).auc
    _say(f"before: perplexity {before:.2f}, AUC {chance:.3f}")
    first = ["before", f"{before:.2f}", f"{chance:.3f}", "", ""]
    trained = sum(x.size for x in jax.tree.leaves(untrained))
    outcomes: dict[float, Outcome] = {}
    given.output.write_text(_page(given, first, outcomes, trained), encoding="utf-8")
    for epsilon in given.epsilons:
        nnx.update(model, jax.tree.map(jnp.asarray, untrained))
        start = time.monotonic()
        found, noise = fine_tune(given, model, rows, epsilon)
        minutes = (time.monotonic() - start) / 60
        losses = scores.losses(model, canary_rows)
        report = membership_report(losses[planted], losses[~planted], guarantee=found)
        perplexity = scores.perplexity(model, held_out)
        outcomes[epsilon] = Outcome(perplexity, report, found, noise, minutes)
        _say(f"ε = {epsilon or '∞'}: perplexity {perplexity:.2f}, AUC {report.auc:.3f}")
        given.output.write_text(_page(given, first, outcomes, trained), encoding="utf-8")
    return given.output.read_text(encoding="utf-8")


def _page(
    given: LanguageArguments, first: list[str], outcomes: dict[float, Outcome], trained: int
) -> str:
    options = " ".join(
        f"--{field.name.replace('_', '-')} {_option(getattr(given, field.name))}"
        for field in dataclasses.fields(given)
        if field.name not in ("data_dir", "output") and getattr(given, field.name) != field.default
    )
    rows = [first]
    rows += [
        [f"ε = {epsilon:g}" if epsilon else "not private", f"{x.perplexity:.2f}",
         f"{x.report.auc:.3f}", f"{x.noise_multiplier:.3f}", f"{x.minutes:.1f}"]
        for epsilon, x in outcomes.items()
    ]  # fmt: skip
    table = markdown_table(
        ["", "perplexity", "AUC of canaries", "noise multiplier", "minutes"], rows
    )
    parts = [
        "# Gemma 3 270M on news",
        f"    {weights.COMMAND} --data-dir DATA --output FILE {options}".rstrip(),
        f"Computed on {datetime.date.today()}, with JAX {jax.__version__} on "
        f"{jax.devices()[0].device_kind}. One run for each row: {given.steps} steps of "
        f"{given.batch_size} texts on average, out of {given.examples} news items and "
        f"{given.canaries // 2} planted canaries, with δ = {given.delta:g}. LoRA of rank "
        f"{given.rank} in the last {given.layers} of {weights.LAYERS} layers trains {trained:,} "
        f"numbers. Perplexity is that of {given.held_out} other news items of at most "
        f"{given.length} tokens. The AUC is that of a threshold on the loss, which tells the "
        f"planted canaries from {given.canaries - given.canaries // 2} others; 0.5 is a guess.",
        table,
        *(f"The canaries of the run {_name(e)}:\n\n```text\n{x.report}\n```"
          for e, x in outcomes.items()),
        *(f"The guarantee of the run {_name(e)}:\n\n```text\n{x.guarantee}\n```"
          for e, x in outcomes.items() if x.guarantee is not None),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _name(epsilon: float) -> str:
    return f"at ε = {epsilon:g}" if epsilon else "without privacy"


def _option(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _say(text: str) -> None:
    print(text, flush=True)
