"""Measures private LoRA in Gemma 3 270M on news, with tunix or Kauldron."""

import dataclasses
import datetime
import importlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from dpoptax.accounting import Guarantee
from dpoptax.auditing import MembershipReport, membership_report
from dpoptax.training import save_params
from dpoptax.training.errors import ConfigError
from dpoptax.training.run.files import markdown_table
from experiments.gemma import weights
from experiments.gemma.problem import (
    LanguageArguments,
    Network,
    Problem,
    Scores,
    make_plan,
    make_problem,
)
from experiments.text.texts import read_texts

TITLES = {"tunix": "tunix", "kauldron": "Kauldron"}
_CLASSES = {
    "tunix": "experiments.gemma.tunix_run:TunixNetwork",
    "kauldron": "experiments.gemma.kauldron_run:KauldronNetwork",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The scores of a model.

    Attributes:
        perplexity: Perplexity of the held-out texts.
        report: The membership report on the canaries.
        guarantee: The guarantee; None without privacy.
        noise_multiplier: Its noise multiplier; None without privacy.
        minutes: Minutes of the training; None before it.
    """

    perplexity: float
    report: MembershipReport
    guarantee: Guarantee | None = None
    noise_multiplier: float | None = None
    minutes: float | None = None


def run(given: Annotated[LanguageArguments, tyro.conf.arg(name="")]) -> str:
    """Fine-tunes Gemma 3 270M on news with LoRA, with and without privacy."""
    make_network = _network_class(given.trainer)
    news, reader = read_texts("agnews", given.data_dir), weights.open_file(given.trainer)
    _say("splitting texts into tokens")
    problem = make_problem(given, weights.read_tokenizer(reader), news)
    _say("reading the weights")
    network: Network = make_network(given, weights.read_weights(reader))
    scores = Scores(network.logits)
    _say("scoring the texts before training")
    outcomes = {"before": _measured(network, scores, problem, None)}
    given.factors.mkdir(parents=True, exist_ok=True)
    page = _write(given, outcomes, network.trained)
    for epsilon in given.epsilons:
        name = f"ε = {epsilon:g}" if epsilon else "not private"
        _say(f"training, {name}")
        plan = make_plan(given, len(problem.rows), epsilon)
        start = time.monotonic()
        found = network.train(plan, problem.rows, private=bool(epsilon))
        minutes = (time.monotonic() - start) / 60
        save_params(_factors_file(given, epsilon), network.factors)
        _say(f"scoring the texts, {name}")
        outcome = _measured(network, scores, problem, found)
        noise = plan.noise_multiplier if epsilon else None
        assert not isinstance(noise, Mapping)
        outcomes[name] = dataclasses.replace(outcome, noise_multiplier=noise, minutes=minutes)
        page = _write(given, outcomes, network.trained)
    return page


def _factors_file(given: LanguageArguments, epsilon: float) -> Path:
    kind = f"epsilon-{epsilon:g}" if epsilon else "not-private"
    return given.factors / f"{given.trainer}-{kind}.msgpack"


def replace_section(page: str, title: str, section: str) -> str:
    """Returns a page with a section of second level replaced, or added at the end."""
    first, *others = re.split(r"^## ", page, flags=re.MULTILINE)
    sections = dict(other.split("\n", 1) for other in others) | {title: section}
    parts = (f"## {name}\n\n{text.strip()}\n" for name, text in sections.items())
    return "\n".join([first.rstrip() + "\n", *parts])


def _network_class(trainer: str) -> Any:
    """Imports the trainer, which may be missing."""
    module, name = _CLASSES[trainer].split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"`language` needs {TITLES[trainer]}: {error}. Run `{weights.command(trainer)}`."
        ) from error


def _measured(
    network: Network, scores: Scores, problem: Problem, guarantee: Guarantee | None
) -> Outcome:
    """Returns the scores of a model."""
    params, planted = network.params, problem.planted
    losses = scores.losses(params, problem.canaries)
    report = membership_report(losses[planted], losses[~planted], guarantee=guarantee)
    outcome = Outcome(scores.perplexity(params, problem.held_out), report, guarantee)
    _say(f"perplexity {outcome.perplexity:.2f}, AUC of canaries {report.auc:.3f}")
    return outcome


def _write(given: LanguageArguments, outcomes: Mapping[str, Outcome], trained: int) -> str:
    """Writes the section of the trainer to the page, and returns it."""
    page = "# Gemma 3 270M on news\n\n"
    if given.output.exists():
        page = given.output.read_text(encoding="utf-8")
    section = _section(given, outcomes, trained)
    changed = replace_section(page, TITLES[given.trainer], section)
    given.output.write_text(changed, encoding="utf-8")
    return section


def _section(given: LanguageArguments, outcomes: Mapping[str, Outcome], trained: int) -> str:
    options = "".join(
        f" --{field.name.replace('_', '-')} {_option(getattr(given, field.name))}"
        for field in dataclasses.fields(given)
        if field.name not in ("data_dir", "output", "factors", "trainer")
        and getattr(given, field.name) != field.default
    )
    rows = [
        [name, f"{x.perplexity:.2f}", f"{x.report.auc:.3f}",
         "" if x.noise_multiplier is None else f"{x.noise_multiplier:.3f}",
         "" if x.minutes is None else f"{x.minutes:.1f}"]
        for name, x in outcomes.items()
    ]  # fmt: skip
    header = ["", "perplexity", "AUC of canaries", "noise multiplier", "minutes"]
    planted, command = given.canaries // 2, weights.command(given.trainer)
    draws = given.steps * given.batch_size / (given.examples + planted)
    parts = [
        f"```bash\n{command} --data-dir DATA --output FILE{options}\n```",
        f"Computed on {datetime.date.today()}, with JAX {jax.__version__} on "
        f"{jax.devices()[0].device_kind}. One run for each row: {given.steps} steps of "
        f"{given.batch_size} texts on average, out of {given.examples:,} news items and "
        f"{planted} planted canaries, with δ = {given.delta:g}. Each text is drawn {draws:.2g} "
        f"times on average. LoRA of rank {given.rank} in the last {given.layers} of "
        f"{weights.LAYERS} layers trains {trained:,} numbers. Perplexity is that of "
        f"{given.held_out} other news items of at most {given.length} tokens. The AUC is that of "
        "a threshold on the loss, which tells the planted canaries from "
        f"{given.canaries - planted} others; 0.5 is a guess. Minutes are those of training.",
        markdown_table(header, rows),
        *(f"The canaries, {name}:\n\n```text\n{x.report}\n```" for name, x in outcomes.items()),
        *(f"The guarantee, {name}:\n\n```text\n{x.guarantee}\n```"
          for name, x in outcomes.items() if x.guarantee is not None),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _option(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
