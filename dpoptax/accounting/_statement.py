"""The text of a guarantee: its claim and all of its terms."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dpoptax._support.rounded import round_up, to_digits

FALSE_POSITIVE_RATE = 0.01
BLANK = "__________"
"""A blank for facts that only the person responsible for the data knows."""

_NEIGHBORS = {
    "add-or-remove-one": "one {} more or less",
    "replace-one": "one {} replaced by another",
    "replace-special": "one {} replaced by one that adds nothing",
}
_NEIGHBORS_OF_SEVERAL = {
    "add-or-remove-one": "any {} {} more or less",
    "replace-one": "any {} {} replaced by others",
    "replace-special": "any {} {} replaced by ones that add nothing",
}
_UNITS = {"example": "example", "user": "user with all of its records"}
_UNITS_OF_SEVERAL = {"example": "examples", "user": "users with all of their records"}
_ACCOUNTANTS = {"pld": "by privacy loss distributions", "rdp": "by Rényi divergences"}
_GENERATORS = {"threefry": "threefry", "chacha20": "ChaCha20"}
_MAX_PHASES = 4  # the number of listed phases of a schedule
_CLAIMED = ("epsilon", "delta", "unit", "neighboring_relation", "records")


def statement_text(values: Mapping[str, Any]) -> str:
    """Returns the text of `Guarantee.to_dict()`: the claim, then its terms.

    ε and δ are rounded up and noise multipliers down, so the text never claims too much.
    """
    claim = claim_text(*(values[name] for name in _CLAIMED))
    if not math.isfinite(values["epsilon"]):
        return claim
    lines = {
        "releases": _releases(values["releases"]),
        "batches": _batches(values["sampling"], values["unit"]),
        "random": _generators(values["releases"], values["sampling"]),
        "accounted": _ACCOUNTANTS[values["accountant"]] + _others(values["other_events"]),
        "attacks": f"true-positive rate at most {round_up(100 * values['attack_success'])} % at a "
        f"false-positive rate of {100 * FALSE_POSITIVE_RATE:g} %; μ = {round_up(values['gdp_mu'])}",
        "selected": _selected(values["selections"]),
        "holds": _arithmetic(values["releases"]),
        "secret": _secrets(values)
        + ", the numbers of trials and all that were not selected" * bool(values["selections"]),
        "left out": f"{'other ' * bool(values['selections'])}settings chosen by private results, "
        "and what else was published",
    }
    width = max(map(len, lines)) + 2
    return "\n".join([claim, *(f"  {name:{width}}{text}" for name, text in lines.items() if text)])


def claim_text(epsilon: float, delta: float, unit: str, relation: str, records: int = 1) -> str:
    """Returns the claim of ε and δ for a number of units, under a neighboring relation."""
    neighbors = _NEIGHBORS[relation].format(_UNITS[unit])
    if records > 1:
        neighbors = _NEIGHBORS_OF_SEVERAL[relation].format(records, _UNITS_OF_SEVERAL[unit])
    rounded = to_digits(delta, 6)
    if not math.isfinite(epsilon):
        return f"not private: no ε holds at δ = {rounded} for {neighbors}"
    return f"({round_up(epsilon)}, {rounded})-differentially private for {neighbors}"


def _secrets(values: Mapping[str, Any]) -> str:
    if values["releases"] or values["selections"]:
        return "the noise key, the sampler's seed, and checkpoints that hold them"
    return "the random numbers of each release, and keys and seeds that they come from"


def _releases(stages: Sequence[Mapping[str, Any]]) -> str:
    texts = Counter(map(_release, stages))
    return "; ".join(text if n == 1 else f"{n} × {text}" for text, n in texts.items())


def _release(stage: Mapping[str, Any]) -> str:
    # Only the ledger of a run knows the generator of its noise.
    planned = " planned," if stage["generator"] is None else ""
    text = f"{stage['number']:,}{planned} of the Gaussian mechanism, noise "
    text += multipliers_text(stage["phases"])
    return text if stage["strategy"] is None else f"{text}, correlated by {stage['strategy']}"


def multipliers_text(phases: Sequence[tuple[int, float]]) -> str:
    """Returns the noise multiplier, or those of a schedule by their first steps."""
    values = [to_digits(sigma, 6, lower=True) for _, sigma in phases]
    if len(phases) == 1:
        return f"multiplier {values[0]}"
    texts = [
        f"{sigma} from step {first} on" for (first, _), sigma in zip(phases, values, strict=True)
    ]
    if len(texts) > _MAX_PHASES:
        texts = [*texts[: _MAX_PHASES - 1], "…", texts[-1]]
    return f"multipliers {', '.join(texts)}"


def _batches(sampling: Mapping[str, Any], unit: str) -> str:
    if "dataset_size" in sampling:
        return (
            f"{sampling['batch_size']:,} expected of {sampling['dataset_size']:,} {unit}s, drawn "
            f"by {sampling['sampling']}"
        )
    if "sampling_probability" in sampling:
        return f"Poisson samples with probability {sampling['sampling_probability']:g}"
    return ""


def _selected(selections: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"the {selection_text(**each)}" for each in selections)


def selection_text(mean: float, distribution: str) -> str:
    """Returns the random number of trials whose best one is published."""
    return f"best of a {distribution} number of trials with mean {mean:g}"


def _generators(stages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> str:
    noise = sorted({_GENERATORS[s["generator"]] for s in stages if s["generator"] is not None})
    texts = [f"noise by {' and '.join(noise)}"] if noise else []
    texts += [f"batches by {sampling['generator']}"] if "generator" in sampling else []
    return ", ".join(texts)


def _others(count: int) -> str:
    return f", with {count} other event{'s' * (count > 1)} on the data" if count else ""


def _arithmetic(stages: Sequence[Mapping[str, Any]]) -> str:
    kinds = {stage["fixed_point"] for stage in stages}
    # None: a planned run does not say whether its noise is in fixed point.
    if not kinds or None in kinds:
        return ""
    if kinds == {True}:
        return "for every bit of a release"
    return "for real numbers, not for the last bits of a release"
