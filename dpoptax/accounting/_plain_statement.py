"""The text of a guarantee for readers without mathematics."""

import decimal
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpoptax._support.rounded import one_in, round_up
from dpoptax.accounting._statement import FALSE_POSITIVE_RATE

_UNITS = {
    "example": "one example, which is one row of the training data. A person with several rows is "
    "protected less well. Rows of one person, at most: ",
    "user": "one user, with all rows of that user together. What a user is, and how rows were "
    "assigned to users: ",
}
_CHANGES = {
    "add-or-remove-one": "whether or not this {} was part of the data",
    "replace-one": "the values of this {}",
    "replace-special": "whether or not this {} contributed",
}
_SIDES = {
    "add-or-remove-one": ("part of the data", "not part of the data"),
    "replace-one": ("in the data as the attacker suspects", "in the data with other values"),
    "replace-special": ("used for training", "left out"),
}
_COMPARED = {
    "add-or-remove-one": "with this {} as without it",
    "replace-one": "with one set of values of this {} as with another",
    "replace-special": "if this {} contributes as if it does not",
}
_ATTACKED = 1000  # the number on each side of the example of an attack
_EXACT = (
    "The proof holds for the numbers as a computer stores and rounds them, down to the last digit."
)
_UNKNOWN = (
    "A computer rounds. In theory, the last digits of a published number can reveal more than "
    "stated, unless the software took measures against that."
)
_REAL = (
    'The proof "holds for real numbers": it treats the results as exact numbers with infinitely '
    "many digits. A computer rounds. In theory, the last digits of a published number can reveal "
    "more than stated, and the training took no measure against that."
)


def plain_statement(
    values: Mapping[str, Any],
    *,
    owners: str,
    public_data: str,
    settings: str,
    publications: str,
    batches: str,
    model: str,
    signature: str,
) -> str:
    """Returns sections on `Guarantee.to_dict()`: the unit, the strength, the assumptions.

    Numbers are rounded against the claim, as in the statement for experts.
    """
    unit, relation, records = (values[k] for k in ("unit", "neighboring_relation", "records"))
    if not math.isfinite(values["epsilon"]):
        return (
            f"There is no protection. A guarantee would be about {unit}s, but no strength can be "
            "stated for this run: it added no noise, or noise without a proof. Its results may "
            "reveal the training data, and must not be published as private."
        )
    protects, noun = _UNITS[unit], unit
    if records > 1:
        noun = f"group of {records} {unit}s"
        protects = f"any {noun}, such as all rows of one person. Rows of one person, at most: "
    selections = values["selections"]
    trained = bool(values["releases"] or selections)
    results = "Model, with its file" if trained else "Results, with their files"
    assumed = (
        _secrets(values["releases"], trained=trained),
        "How many trainings were tried, how long they took, and all of them except the best must "
        "stay secret, or be deleted."
        if selections
        else "",
        _batches(values, batches),
        _arithmetic(values["releases"]),
        _others(values["other_events"], publications),
        "Choosing settings by comparing results on the protected data can reveal more. The numbers "
        + (
            "above include the choice of the best training. They do not include other choices, "
            f"unless it is said here. Other choices, and how they were made: {settings}."
            if selections
            else "above do not include this, unless it is said here. How they were chosen: "
            f"{settings}."
        ),
        "Data that were treated as public are not protected, such as those behind an earlier "
        f"model, or those used for tests. These data: {public_data}.",
    )
    sections = {
        "What this statement is about": (
            f"{_subject(values['releases'], selections)}\n\n"
            + _listed((f"{results}: {model}", f"Date, name, signature: {signature}"))
        ),
        "What is protected": (
            f"The unit of protection is {protects}{owners}.\n\n"
            f"{'The training used random numbers' if trained else 'Random numbers were used'}, so "
            "a repetition would give other results. The "
            "guarantee limits how much the chance of any result can depend on "
            f"{_CHANGES[relation].format(noun)}. It covers everything that can be computed from "
            "the published results, by anyone, with any other knowledge and at any later time. It "
            "does not prevent conclusions that the data of others allow."
        ),
        "How strong the protection is": _strength(
            values["epsilon"], values["delta"], values["attack_success"], noun, relation
        ),
        "What it assumes": _listed(filter(None, assumed)),
    }
    return "\n\n".join(f"{name}\n\n{text}" for name, text in sections.items())


def _subject(releases: Sequence[Mapping[str, Any]], selections: Sequence[Mapping[str, Any]]) -> str:
    if len(selections) == 1 and not releases:
        return (
            "It is about the best of several trainings. Their number was drawn at random and is "
            f"secret; on average it is {selections[0]['mean']:g}."
        )
    if not releases:
        return (
            "It is about one or several uses of the data together. The statement of each use, such "
            "as a training, describes it."
        )
    if all(stage["generator"] is None for stage in releases):
        return "It is about the plan of a training, not about its result."
    return "It is about a finished training."


def _listed(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _strength(epsilon: float, delta: float, success: float, noun: str, relation: str) -> str:
    inside, outside = _SIDES[relation]
    plural = f"{noun}s" if noun in _UNITS else noun.replace("group", "groups", 1)
    wrong = round(_ATTACKED * FALSE_POSITIVE_RATE)
    # Rounded up, so the example never claims too much.
    right = min(_ATTACKED, math.ceil(_ATTACKED * success))
    text = (
        f"Two numbers measure it, ε (epsilon) = {round_up(epsilon)} and δ (delta) = "
        f"{one_in(delta)}; smaller is stronger. Whatever somebody concludes from the results, "
        f"the chance of this conclusion is at most {_factor(epsilon)} times as large "
        f"{_COMPARED[relation].format(noun)}, and the other way round, plus at most "
        f"{one_in(delta)}.\n\n"
        "For example, an attacker knows all other data, may use any method, and wants to find "
        f"{plural} that were {inside}. Of {_ATTACKED:,} that were {outside}, the attacker wrongly "
        f"names {wrong} on average. Then of {_ATTACKED:,} that were {inside}, the attacker names "
        f"at most {right:,} on average. Guessing without the results would name {wrong}."
    )
    if right == _ATTACKED:
        text += " So in this example, the guarantee excludes nothing."
    return text


def _factor(epsilon: float) -> str:
    if epsilon < 100:
        return f"{decimal.Decimal(round_up(math.exp(epsilon))):,f}"
    return f"10^{math.ceil(epsilon / math.log(10))}"


def _secrets(releases: Sequence[Mapping[str, Any]], *, trained: bool) -> str:
    if not trained:  # several uses, or events that were priced by hand
        return (
            "The random numbers that hide the data in each use come from secret numbers, such as "
            "keys and seeds. The proof treats them as perfectly random. They must have been drawn "
            "at random, used once, and kept secret or deleted, with all files that contain them. "
            "Anyone who learns them can remove the protection."
        )
    steps = sum(stage["number"] for stage in releases)
    if steps:
        random, run = f"The random numbers that hide the data in {steps:,} training steps", "run"
    else:
        random, run = "The random numbers of each training", "training"
    return (
        f"{random} are computed from two secret numbers, a key and a seed. The proof treats them "
        f"as perfectly random. Key and seed must have been drawn at random, used for this {run} "
        "only, and kept secret or deleted, with all files that contain them. Anyone who learns "
        "them can remove the protection."
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
            f"{text} dpoptax, the software of the training, chose them itself, and checked that "
            f"the data have this number of {unit}s."
        )
    return (
        f"{text} dpoptax, the software that protects the data, did not see whether the program did "
        f"so, or whether the data have this number of {unit}s. (In a program, `run.batches` does "
        f"both.) Confirmed by, and how: {confirmed}."
    )


def _arithmetic(releases: Sequence[Mapping[str, Any]]) -> str:
    kinds = {stage["fixed_point"] for stage in releases}
    if not kinds:
        return _UNKNOWN
    if None in kinds:
        return ""
    return _EXACT if kinds == {True} else _REAL


def _others(count: int, publications: str) -> str:
    text = "Other results from the same data weaken the protection: what they reveal adds up."
    if count:
        text += f" The numbers above include {count} other use{'s' * (count > 1)} of the data."
    return f"{text} All other publications, and models that somebody has seen: {publications}."
