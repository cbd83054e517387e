"""The text of a guarantee for readers without mathematics."""

import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpoptax.accounting._statement import FALSE_POSITIVE_RATE, round_up

_UNITS = {
    "example": "one example, which is one row of the training data. A person with several rows is "
    "protected less well. Rows of one person, at most: ",
    "user": "one user, with all rows of that user together. What a user is, and how rows were "
    "assigned to users: ",
}
_CHANGES = {
    "add-or-remove-one": "whether or not this {} was part of the data",
    "replace-one": "whichever values this {} has",
    "replace-special": "whether or not this {} contributed",
}
_SIDES = {
    "add-or-remove-one": ("part of the data", "not part of the data"),
    "replace-one": ("in the data as the attacker suspects", "in the data with other values"),
    "replace-special": ("used for training", "left out"),
}
_ATTACKED = 1000  # the number on each side of the example of an attack
_EXACT = (
    "The proof holds for the numbers as a computer stores and rounds them, down to the last digit."
)
_REAL = (
    'The proof "holds for real numbers": it treats the results as exact numbers with infinitely '
    "many digits. A computer rounds. In theory, the last digits of a published number can reveal "
    "more than stated, and this run took no measure against that."
)


def plain_statement(
    values: Mapping[str, Any],
    *,
    owners: str,
    public_data: str,
    settings: str,
    publications: str,
    batches: str,
) -> str:
    """Returns three paragraphs on `Guarantee.to_dict()`: the unit, the strength, the assumptions.

    Numbers are rounded against the claim, as in the statement for experts.
    """
    unit, relation, records = (values[k] for k in ("unit", "neighboring_relation", "records"))
    protects, noun = _UNITS[unit], unit
    if records > 1:
        noun = f"group of {records} {unit}s"
        protects = f"any {noun}, such as all rows of one person. Rows of one person, at most: "
    planned = all(stage["generator"] is None for stage in values["releases"])
    protected = (
        ("This is the plan of a training, not its result. " if planned else "")
        + f"What is protected. The unit of protection is {protects}{owners}. The guarantee is "
        "about everything that can be computed from the published results, by anyone, with any "
        "other knowledge and at any later time. They are nearly as likely "
        f"{_CHANGES[relation].format(noun)}."
    )
    if not math.isfinite(values["epsilon"]):
        return (
            f"There is no protection. A guarantee would be about {unit}s, but no strength can be "
            "stated for this run: it added no noise, or noise without a proof. Its results may "
            "reveal the training data, and must not be published as private."
        )
    return "\n\n".join(
        [
            protected,
            _strength(values["epsilon"], values["delta"], values["attack_success"], noun, relation),
            " ".join(
                [
                    "What it assumes.",
                    _secrets(values["releases"]),
                    _batches(values, batches),
                    _arithmetic(values["releases"]),
                    _others(values["other_events"], publications),
                    f"Choosing settings by looking at private results can reveal more, and is not "
                    f"included. How the settings of the training were chosen: {settings}.",
                    f"Data that were treated as public, such as those of a pretrained model, a "
                    f"tokenizer or a test, are not protected. These data: {public_data}.",
                ]
            ),
        ]
    )


def _strength(epsilon: float, delta: float, success: float, noun: str, relation: str) -> str:
    inside, outside = _SIDES[relation]
    plural = f"{noun}s" if noun in _UNITS else noun.replace("group", "groups", 1)
    wrong = round(_ATTACKED * FALSE_POSITIVE_RATE)
    right = min(_ATTACKED, math.ceil(_ATTACKED * success))
    return (
        f"How strong the protection is. Two numbers measure it, ε (epsilon) = {round_up(epsilon)} "
        f"and δ (delta) = {_delta_text(delta)}; smaller is stronger. No result becomes more than "
        f"{_factor(epsilon)} times as likely by the presence of one {noun}, except for an added "
        f"chance of at most {_delta_text(delta)}. For example, suppose that an attacker knows all "
        f"other data and may use any method. Of {_ATTACKED:,} {plural} that were {outside}, the "
        f"attacker wrongly accuses {wrong} on average. Then of {_ATTACKED:,} that were {inside}, "
        f"the attacker finds at most {right:,} on average. Guessing finds {wrong}."
    )


def _factor(epsilon: float) -> str:
    if epsilon < 100:
        return round_up(math.exp(epsilon))
    return f"10^{math.ceil(epsilon / math.log(10))}"


def _delta_text(delta: float) -> str:
    return f"1 in {int(1 / fractions.Fraction(repr(float(delta)))):,}"


def _secrets(releases: Sequence[Mapping[str, Any]]) -> str:
    steps = sum(stage["number"] for stage in releases)
    noise = f" that hide the data in {steps:,} training steps" if steps else ""
    return (
        f"The random numbers{noise} are computed from a key and a seed, and the proof treats them "
        "as perfectly random. Key and seed must have been drawn at random, used for this run only, "
        "and kept secret or deleted, with all files that contain them. Anyone who learns them can "
        "remove the protection."
    )


def _batches(values: Mapping[str, Any], confirmed: str) -> str:
    sampling, unit = values["sampling"], values["unit"]
    if "dataset_size" not in sampling:
        return ""
    text = (
        f"Each step used about {sampling['batch_size']:,} of {sampling['dataset_size']:,} {unit}s, "
        f"chosen at random in a certain way (by {sampling['sampling']})."
    )
    if "group_sizes" in sampling:
        text += (
            f" It chose from groups. Their sizes and which {unit} belongs to which group are "
            "treated as public."
        )
    if values["drawn"]:
        return (
            f"{text} dpoptax chose them itself, and checked that the data have this number of "
            f"{unit}s."
        )
    return (
        f"{text} dpoptax did not see whether the program did so, or whether the data have this "
        f"number of {unit}s. `plan.batches` does both. Confirmed by, and how: {confirmed}."
    )


def _arithmetic(releases: Sequence[Mapping[str, Any]]) -> str:
    kinds = {stage["fixed_point"] for stage in releases}
    if not kinds or None in kinds:
        return ""
    return _EXACT if kinds == {True} else _REAL


def _others(count: int, publications: str) -> str:
    text = "What else is published about the same data adds up with these results."
    if count:
        text += f" The numbers above include {count} other use{'s' * (count > 1)} of the data."
    return f"{text} All other publications, and models that somebody has seen: {publications}."
