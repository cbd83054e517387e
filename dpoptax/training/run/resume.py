"""Checks that a run may resume: same mechanism, sampler, data and arithmetic."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dpoptax
from dpoptax.sampling import Sampler
from dpoptax.training import hosts
from dpoptax.training.data import streaming
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import devices, records
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints
from dpoptax.users import UserTable

METRICS = "metrics.jsonl"
"""Name of the file with a line for each evaluation of a run."""

# Up to this number of devices, the margin for rounding is the same (docs/developers/bound.md).
_FEW = 8


def ledgers(opt_state: Any) -> list[dict[str, Any]]:
    """Returns the ledgers of an optimizer state as JSON values."""
    return [
        records.plain({**dataclasses.asdict(ledger.mechanism), "releases": ledger.releases})
        for ledger in dpoptax.ledgers(opt_state)
    ]


def begun(checkpoints: Checkpoints, workdir: Path) -> dict[str, Any] | None:
    """Returns the record of the run in a folder, or None for an empty folder.

    Raises:
        CheckpointError: The folder has metrics without a checkpoint.
    """
    record = checkpoints.newest_record()
    if record is None and (workdir / METRICS).exists():
        raise CheckpointError(
            "`workdir` must not hold the metrics of a run without its checkpoints, got "
            f"{str(workdir)!r}. Starting again would ignore the earlier releases. Use another "
            "workdir, or remove these files if they do not matter."
        )
    return record


def shown_records(metrics: Path) -> dict[int, dict[str, Any]]:
    """Reads the records of earlier starts of the run, by step."""
    if not metrics.exists():
        return {}
    lines = metrics.read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # a killed run may leave a part of a line
            record = json.loads(line)
            found[record["step"]] = record
    return found


def with_shown(
    history: list[dict[str, Any]], step: int, shown: Mapping[int, dict[str, Any]]
) -> tuple[dict[str, Any], ...]:
    """Adds the record of a checkpoint's step, which was shown after the checkpoint was complete.

    Args:
        history: The records in the checkpoint.
        step: The step of the checkpoint.
        shown: The records of earlier starts by step.
    """
    last, known = history[-1]["step"] if history else -1, step in shown
    # Hosts evaluate together or not at all.
    if last < step and hosts.same_on_all_hosts(repr(known)) and known:
        return (*history, shown[step])
    return tuple(history)


def as_shown(
    observe: Callable[[dict[str, Any]], object], earlier: dict[int, dict[str, Any]]
) -> Callable[[dict[str, Any]], object]:
    """Wraps `observe` to check that records equal earlier ones bit for bit.

    A repeated step has the same noise. If its sum is rounded differently, because of other compiler
    flags, another processor or kernels without a fixed order, the difference of both results
    reveals data without noise. Each step that was shown must therefore be shown again before later
    steps.
    """
    passed = -1

    def checked(record: dict[str, Any]) -> object:
        nonlocal passed
        left_out = [step for step in earlier if passed < step < record["step"]]
        if left_out:
            raise ConfigError(
                f"`eval_every` must divide {left_out[0]}, because the metrics of this step were "
                "shown and must be reproduced. With fixed_point=True, every bit of the repeated "
                "steps must be the same."
            )
        passed = record["step"]
        before = earlier.get(record["step"], {})
        now = records.plain(record)
        names = now.keys() & before.keys() - {"seconds", "epsilon"}
        if any(now[name] != before[name] for name in names):
            raise ConfigError(
                f"The metrics of step {record['step']}, which were shown before, must be "
                "reproduced exactly with fixed_point=True. This start rounds differently. Use the "
                "original machine, flags and test split, or use another workdir and account for "
                "both runs."
            )
        return observe(record)

    return checked


def check_same_fields(new: dict[str, Any], record: dict[str, Any], workdir: Path) -> None:
    """Raises a `ConfigError` for the first field that differs from the run to resume."""
    old = record["run"]
    for field in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(field), new.get(field)
        if before != now:
            raise ConfigError(
                f"`{field}` must be {before!r}, as in the first {record['step']} steps of the run "
                f"in {workdir}, got {now!r}. Set {field}={before!r} to continue that run, or use "
                "another workdir for a new run."
            )


def arithmetic(sampler: Sampler, place: devices.Devices, *, exact: bool) -> dict[str, Any]:
    """Returns the values other than the config that affect the sums of a run.

    These are the rows of a batch and the number of devices above eight, which lower the clipping
    bound slightly; the package versions; and JAX's settings of precision and random keys. If every
    bit counts (`exact`), they include any number of devices and hosts, which change the order of
    additions.
    """
    shards = 1 if place.mesh is None else place.mesh.size
    rows = -(-sampler.padded_size // shards) * shards
    device = jax.devices()[0] if place.mesh is None else place.mesh.devices.flat[0]
    numbers: Any = jax.config
    return {
        "rows": rows,
        "devices": shards if exact else max(shards, _FEW),
        **({"hosts": jax.process_count()} if exact else {}),
        "kind of device": device.device_kind,
        "jax_enable_x64": bool(numbers.jax_enable_x64),
        "jax_default_matmul_precision": numbers.jax_default_matmul_precision,
        "jax_threefry_partitionable": bool(numbers.jax_threefry_partitionable),
        **records.versions(),
    }


def check_restored(
    identity: dict[str, Any],
    record: dict[str, Any],
    opt_state: Any,
    *,
    steps: int,
    shown: int,
    exact: bool,
) -> None:
    """Raises a `ConfigError` if the run must not resume from a restored checkpoint.

    Args:
        identity: The values of the current start that must be those of the record.
        record: Record of the checkpoint.
        opt_state: Optimizer state of the checkpoint.
        steps: Number of permitted steps now.
        shown: The last step whose metrics an earlier start has shown.
        exact: Whether the guarantee holds for every bit, so that rounding must not change.
    """
    _check_ledgers(record, opt_state)
    _check_same_data(record, identity["data"])
    _check_same_program(record, identity)
    _check_same_sums(record, identity["arithmetic"], shown, exact=exact)
    if max(record["step"], steps) < shown:  # the stated ε would not cover all released steps
        raise ConfigError(
            f"`steps` must be at least {shown}, the last step whose metrics the run has shown, got "
            f"{steps}. The stated ε would cover fewer steps than were released."
        )


def _check_same_program(record: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises a `ConfigError` if the loss, the optimizer or anything else in a step has changed.

    Two copies of a run that continue with two programs would add the same noise to two sums. A
    finished run would return the parameters of another program.
    """
    old, new = record["program"], identity["program"]
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not changed:
        return
    environment = _changes(record["arithmetic"], identity["arithmetic"])
    also = f" These values also changed: {environment}." if environment else ""
    raise ConfigError(
        f"{changed[0]} must be the same as in the first {record['step']} steps of the run. The "
        f"noise of a step belongs to one program.{also} Restore it to continue that run, or use "
        "another workdir for a new run."
    )


def _check_same_sums(
    record: dict[str, Any], new: dict[str, Any], shown: int, *, exact: bool
) -> None:
    """Raises a `ConfigError` if released steps would be repeated with other sums.

    Both releases would have the same noise, so their difference would reveal the change of the
    batch, the clip or the rounding without noise. Shown steps are repeated only if a checkpoint was
    removed. If every bit counts, two copies of a run must not round differently either.
    """
    old, step = record["arithmetic"], record["step"]
    if old == new or (shown <= step and not exact):
        return
    why = "with fixed_point=True."
    if shown > step:
        why = (
            f"after its metrics were shown. Step {shown} was shown, the last checkpoint is of step "
            f"{step}."
        )
    raise ConfigError(
        f"The arithmetic of a run must not change {why} These values changed: "
        f"{_changes(old, new)}. Repeated steps would add the same noise to other sums. Restore the "
        "original arithmetic, or use another workdir and account for both runs."
    )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {old.get(name)!r} -> {value!r}"
        for name, value in new.items()
        if value != old.get(name)
    )


def check_same_on_hosts(
    identity: dict[str, Any], data: streaming.Source, users: UserTable | None
) -> None:
    """Raises a `ConfigError` if hosts differ in config, seed, data, owners or versions.

    Each host reads its part of a batch. If the order of their records differed, a record could be
    in the parts of two hosts and move the sum by 2C, and hosts with other seeds would add other
    noise. So every host reads and hashes all records once. With equal hashes, the run is that of
    one host, unless SHA-256 is broken. A sample of records would not prove it: a single step with a
    record in two parts already spends more than the stated ε.
    """
    if jax.process_count() == 1:
        return
    table = {} if users is None else vars(users)
    owners = {name: x for name, x in table.items() if isinstance(x, np.ndarray)}
    others = {name: x for name, x in table.items() if name not in owners}
    hashed = streaming.digest(data), streaming.digest(owners), repr(sorted(others.items()))
    if not hosts.same_on_all_hosts(repr((identity, hashed))):
        raise ConfigError(
            "All hosts must have the same config, seed, noise key, training examples and package "
            "versions. Otherwise hosts draw different batches or noise, and one example could be "
            "in a batch twice. Copy the same config, files and packages to all hosts, and list "
            "files in one order, such as with sorted()."
        )


def _check_same_data(record: dict[str, Any], now: str) -> None:
    """Raises a `ConfigError` if examples, owners or frozen weights have changed."""
    if record.get("data") != now:
        raise ConfigError(
            "The training examples, their owners and the frozen arrays or published weights must "
            f"be those of the first {record['step']} steps of the run. No ε holds for two data "
            "sets in one run, and two sums would get the same noise. Restore the original data "
            "(such as `data_dir` and `pretrained`), or use another workdir for a new run."
        )


def _check_ledgers(record: dict[str, Any], opt_state: Any) -> None:
    """Raises a `ConfigError` if the ledgers of a checkpoint do not match its record."""
    found, stored = ledgers(opt_state), record["ledgers"]
    if found != stored or any(ledger["releases"] != record["step"] for ledger in found):
        raise ConfigError(
            f"The checkpoint of step {record['step']} is damaged, because its ledgers are {found} "
            f"but its record states {stored}. Remove it to continue from the previous checkpoint."
        )
