"""Groups records of comparisons by setting and method, and computes differences."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

import dpoptax
from dpoptax.matrix import CyclicPoissonSampler
from dpoptax.runs import to_digits
from dpoptax.training import ConfigError
from experiments import methods
from experiments.config import SAMPLERS, ExperimentConfig
from experiments.image_benchmark.run_lines import Line
from experiments.spreads import mean_and_deviation, paired_difference

BASELINE, MOMENTUM = "DP-SGD", "DP-SGD, momentum"
# Methods in records that dpoptax no longer has. Each takes one gradient of an example in a step.
_REMOVED = {"Scale then privatize", "Singular values", "James-Stein", "Muon", "Shrunk Muon"}


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """The settings that compared runs share.

    Attributes:
        dataset: Name of the data set.
        features: Features that replace its images, if any.
        model: Name of the model.
        steps: Number of steps.
        batch_size: Expected batch size.
        in_order: Whether batches come in a fixed order, without amplification.
        epsilon: ε; infinite without privacy.
        delta: δ; 0 if it is not stated.
        replaced: Whether neighbors replace an example by another instead of adding or removing it.
            The sensitivity of a sum is then up to twice as large.
    """

    dataset: str
    features: str
    model: str
    steps: int
    batch_size: int
    in_order: bool
    epsilon: float
    delta: float
    replaced: bool

    @property
    def stated(self) -> str:
        """Returns the text on ε for headings and figures; empty without privacy."""
        if math.isinf(self.epsilon):
            return ""
        delta = f", δ = {to_digits(self.delta)}" if self.delta else ", no δ stated"
        return delta + " for one example replaced by another" * self.replaced

    @property
    def title(self) -> str:
        """Returns the text for headings and figures."""
        own = f"{self.model if self.features == 'none' else self.features}, "
        order = " in order" if self.in_order else ""
        privacy = f"ε = {self.epsilon:g}{self.stated}"
        return f"{data_name(self.dataset)}, {own}{privacy}, {self.steps} steps{order}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method in a setting.

    Attributes:
        label: Name of the method, with words that distinguish it from others of that name.
        unproven: Whether the method has no proof, and therefore no ε.
        zeroed: Whether ε is for replacing one example by one that adds zero.
        learning_rate: The selected learning rate.
        rates: All learning rates that were tried, in order.
        accuracies: Test accuracies in %, by seed.
        gradients: Number of gradients of each example per step.
    """

    label: str
    unproven: bool
    zeroed: bool
    learning_rate: float
    rates: tuple[float, ...]
    accuracies: dict[int, float]
    gradients: int

    @property
    def mean(self) -> float:
        """Returns the mean accuracy in %."""
        return statistics.fmean(self.accuracies.values())

    @property
    def accuracy(self) -> str:
        """Returns mean and standard deviation over the seeds in %, for tables."""
        return mean_and_deviation(self.accuracies.values())

    @property
    def at_edge(self) -> bool:
        """Returns whether the selected rate is the smallest or largest that was tried."""
        return len(self.rates) > 1 and self.learning_rate in (self.rates[0], self.rates[-1])


Groups: TypeAlias = dict[Setting, list[Entry]]
"""The methods of each setting."""


class Difference(NamedTuple):
    """Mean difference between runs of the same seeds in points, with a 95 % interval.

    Attributes:
        mean: Mean over the seeds that both have.
        half: Student's t times the standard error; infinite for one seed.
    """

    mean: float
    half: float

    @property
    def verdict(self) -> int:
        """Returns 1 if the interval is above zero, −1 if it is below, and else 0."""
        return (self.mean > self.half) - (self.mean < -self.half)


def difference(entry: Entry, other: Entry) -> Difference:
    """Returns the difference of `entry` from `other`, paired by seed."""
    return Difference(*paired_difference(entry.accuracies, other.accuracies))


def grouped(lines: Iterable[Line]) -> Groups:
    """Groups records into methods by setting, in order; the last repeated run counts.

    Runs of one name have a row for each way of drawing batches. A method counts once it has runs on
    the test split at the learning rate that its trials select. Runs without privacy have a separate
    setting.
    """
    lines = list(lines)
    deltas: dict[Setting, set[float]] = {}
    for line in lines:
        if line.delta is not None:
            deltas.setdefault(_setting(line, 0.0), set()).add(line.delta)
    configs: dict[str, set[str]] = {}
    newest: dict[tuple[Setting, str, str], dict[tuple[str, float, int], Line]] = {}
    for line in lines:
        name = line.name.rpartition("/")[2]
        configs.setdefault(line.method, set()).add(name)
        delta = line.delta
        if delta is None:  # no proof: grouped with the methods that state δ, if they share it
            among = deltas.get(_setting(line, 0.0), set())
            delta = min(among) if len(among) == 1 else 0.0
        runs = newest.setdefault((_setting(line, delta), name, _sampling(line)), {})
        runs[line.split, line.learning_rate, line.seed] = line
    found: dict[Setting, dict[str, Entry]] = {}
    for (setting, name, sampling), runs in newest.items():
        of_name = list(runs.values())
        method = of_name[0].method
        label = method if len(configs[method]) == 1 else _told_apart(method, name)
        entry = _entry(label, of_name)
        if entry is not None:
            entries = found.setdefault(setting, {})
            if label in entries:
                label = f"{label}, {sampling}"
                entry = dataclasses.replace(entry, label=label)
            entries[label] = entry
    return {setting: list(entries.values()) for setting, entries in sorted(found.items())}


def titles(settings: Iterable[Setting]) -> dict[Setting, str]:
    """Returns names for headings, with model and batch size if only these differ."""
    return told_apart({s: s.title for s in settings}, model="model", batch_size="B =")


def told_apart(names: Mapping[Setting, str], **fields: str) -> dict[Setting, str]:
    """Returns names of settings, with a field's value if only that field differs."""
    found = dict(names)
    for field, what in fields.items():
        values: dict[str, set[Any]] = {}
        for setting, name in found.items():
            values.setdefault(name, set()).add(getattr(setting, field))
        for setting, name in found.items():
            if len(values[name]) > 1:
                found[setting] = f"{name}, {what} {getattr(setting, field)}"
    return found


def named(entries: Sequence[Entry], label: str) -> Entry | None:
    """Returns the entry with this label."""
    return next((entry for entry in entries if entry.label == label), None)


def data_name(dataset: str) -> str:
    """Returns the data set's name for display, with a remark on its images."""
    return {"mnist": "MNIST", "cifar10": "CIFAR-10, JPEG"}.get(dataset, dataset)


def _entry(label: str, runs: list[Line]) -> Entry | None:
    tried: dict[float, list[float]] = {}
    for run in runs:
        if run.split == "held-out":
            tried.setdefault(run.learning_rate, []).append(run.accuracy)
    tests = [run for run in runs if run.split == "test"]
    if tried:
        best = max(sorted(tried), key=lambda rate: statistics.fmean(tried[rate]))
        tests = [run for run in tests if run.learning_rate == best]
    if not tests:
        return None
    return Entry(
        label=label,
        unproven=tests[0].unproven,
        zeroed=_relation(tests[0]) == "replace-special" and tests[0].delta is not None,
        learning_rate=tests[0].learning_rate,
        rates=tuple(sorted(tried)),
        accuracies={run.seed: 100 * run.accuracy for run in sorted(tests, key=lambda r: r.seed)},
        gradients=_gradients(tests[0]),
    )


def _setting(line: Line, delta: float) -> Setting:
    given = ExperimentConfig().to_dict() | line.settings
    common = ("dataset", "features", "model", "steps", "batch_size")
    return Setting(
        **{name: given[name] for name in common},
        in_order=_sampling(line) == "in_order",
        epsilon=math.inf if line.epsilon is None else line.epsilon,
        delta=delta,
        replaced=line.epsilon is not None and _relation(line) == "replace-one",
    )


def _sampling(line: Line) -> str:
    return str((ExperimentConfig().to_dict() | line.settings)["sampling"])


def _relation(line: Line) -> str:
    """Describes the neighboring relation."""
    sampling = _sampling(line)
    sampler: Any = CyclicPoissonSampler if sampling == "in_order" else SAMPLERS[sampling]
    return str(sampler.neighboring_relation)


def _gradients(line: Line) -> int:
    """Returns the number of gradients of each example per step."""
    if line.settings["method"]["name"] in _REMOVED:
        return 1
    return points(_method(line))


def points(method: methods.Method) -> int:
    """Returns the number of gradients of each example per step, counting copies."""
    params = {"w": jnp.zeros(2)}
    found = dpoptax.gradient_points(method.filter(1.0).init(params), params)
    copies: int = getattr(method, "multiplicity", 1)
    return len(found.points) * copies


def _method(line: Line) -> methods.Method:
    """Returns the method of a line with its parameters."""
    given = dict(line.settings["method"])
    every = vars(methods).values()
    kinds = {kind.name: kind for kind in every if isinstance(kind, type) and hasattr(kind, "name")}
    kind = kinds.get(given.pop("name"))
    if kind is None:
        raise ConfigError(
            f"The records of {line.name} must be of a method of `experiments.methods`, got "
            "another one, whose number of gradients is not known. Remove them from the directory "
            "of the benchmark."
        )
    values = {
        field: tuple(value) if isinstance(value, list) else value for field, value in given.items()
    }
    return kind(**values)


def _told_apart(method: str, name: str) -> str:
    """Returns the method's name and the words that only the name of the config has."""
    own = set(re.split(r"\W+", method.lower()))
    words = [word for word in name.split("_") if word not in own]
    return f"{method}, {' '.join(words)}" if words else method
