"""Checks that a run may go on: same mechanism, sampler, data and arithmetic."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import dpoptax
from dpoptax.sampling import Sampler
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import devices, records
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints

METRICS = "metrics.jsonl"
"""Name of the file with a line for each evaluation of a run."""

# Up to so many devices the room for rounding is the same (docs/developers/bound.md).
_FEW = 8


@dataclasses.dataclass(frozen=True)
class Identity:
    """Everything that tells a run from another one.

    Attributes:
        fields: Values that must not change, as JSON values without the seed.
        data: Fingerprint of the training examples and of constants of the loss; "" if not needed.
        arithmetic: Everything else on which the sums of the run depend.
        secrets: The seed, and other values that a later start needs.
    """

    fields: dict[str, Any]
    data: str
    arithmetic: dict[str, Any]
    secrets: dict[str, Any] = dataclasses.field(repr=False)


def describe(identity: Identity, opt_state: Any) -> dict[str, Any]:
    """Returns the record of a run for a checkpoint, with its ledger, data and devices."""
    return {
        "run": identity.fields,
        "data": identity.data,
        "arithmetic": identity.arithmetic,
        "ledgers": [_ledger(ledger) for ledger in dpoptax.ledgers(opt_state)],
        **identity.secrets,
    }


def begun(checkpoints: Checkpoints, workdir: Path) -> dict[str, Any] | None:
    """Returns the record of the run that began in a folder, or None.

    Raises:
        CheckpointError: There are metrics without a checkpoint.
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
    """Reads the records that earlier starts of the run have written, by their step."""
    if not metrics.exists():
        return {}
    lines = metrics.read_text(encoding="utf-8").splitlines()
    found = (json.loads(line) for line in lines if line.endswith("}"))
    return {record["step"]: record for record in found}


def as_shown(
    observe: Callable[[dict[str, Any]], object], earlier: dict[int, dict[str, Any]]
) -> Callable[[dict[str, Any]], object]:
    """Wraps `observe`, and checks that records equal those of an earlier start bit for bit.

    A step that is run again has the same noise. If its sum is rounded differently, because of other
    compiler flags, another processor or kernels without a fixed order, the difference of the two
    results is data without noise, and no bit of it may be seen. So each step that was shown has to
    be shown again before a later one.
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
    """Raises a `ConfigError` that names the first field in which the begun run differs."""
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
    """Returns everything besides the config on which the sums of a run depend.

    The rows of a batch and the number of devices above eight, by which examples are clipped a
    little shorter; the versions that draw batches, alter examples and compute gradients; in which
    numbers they do, and how keys are split. If every bit counts (`exact`), also any number of
    devices and hosts, which add up in another order.
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
    identity: Identity, record: dict[str, Any], opt_state: Any, *, steps: int, shown: int
) -> None:
    """Raises if the run may not go on from a restored checkpoint to its last step.

    Args:
        identity: Of the run now.
        record: Of the checkpoint.
        opt_state: Of the checkpoint.
        steps: Number of steps that the run is allowed now.
        shown: The last step whose metrics an earlier start has shown.
    """
    _check_ledger(record, opt_state)
    _check_same_data(record, identity.data)
    _check_same_sums(record, identity.arithmetic, shown)
    if max(record["step"], steps) < shown:  # the stated ε would leave out steps
        raise ConfigError(
            f"`steps` must be at least {shown}, the last step whose metrics the run has shown, got "
            f"{steps}. The stated ε would cover fewer steps than were released."
        )


def _check_same_sums(record: dict[str, Any], new: dict[str, Any], shown: int) -> None:
    """Raises if steps whose results were shown would be run again with other sums.

    The same noise would be added to other batches, or to gradients that are clipped or rounded
    differently. The difference of the two results would have no noise.
    """
    old = record.get("arithmetic", {})
    if shown <= record["step"] or old == new:
        return
    others = ", ".join(
        f"{name} {old.get(name)!r} -> {value!r}"
        for name, value in new.items()
        if value != old.get(name)
    )
    raise ConfigError(
        f"The arithmetic of a run must not change after its metrics were shown. Step {shown} was "
        f"shown, the last checkpoint is of step {record['step']}, and these values changed: "
        f"{others}. Repeated steps would add the same noise to other sums. Restore the original "
        "arithmetic, or use another workdir and account for both runs."
    )


def check_same_on_hosts(identity: Identity) -> None:
    """Raises if hosts have another config, seed or data: a record could be in two parts.

    Or other versions, which may draw other noise for the same sum.
    """
    if not devices.same_on_all_hosts(repr((identity, identity.secrets))):
        raise ConfigError(
            "All hosts must have the same config, seed, training examples and package versions. "
            "Otherwise hosts draw different batches, and one example could be in a batch twice. "
            "Copy the same config, files and packages to all hosts."
        )


def _check_same_data(record: dict[str, Any], now: str) -> None:
    """Raises if the begun run had other examples or owners, or another published model."""
    if record.get("data") != now:
        raise ConfigError(
            "The training examples, their owners and the published weights must be those of the "
            f"first {record['step']} steps of the run. No ε holds for two data sets in one run, "
            "and repeated steps would add the same noise to other gradients. Restore the original "
            "files (`data_dir`, `pretrained`), or use another workdir for a new run."
        )


def _check_ledger(record: dict[str, Any], opt_state: Any) -> None:
    """Raises if the restored ledger is not that of the record: a checkpoint mixed from two."""
    for ledger, stored in zip(dpoptax.ledgers(opt_state), record["ledgers"], strict=True):
        restored = _ledger(ledger)
        if restored != stored or ledger.releases != record["step"]:
            raise ConfigError(
                f"The checkpoint of step {record['step']} is damaged, because its ledger is "
                f"{restored} but its record states {stored}. Remove it to continue from the "
                "previous checkpoint."
            )


def _ledger(ledger: dpoptax.extend.Ledger) -> dict[str, Any]:
    return records.plain({**dataclasses.asdict(ledger.mechanism), "releases": ledger.releases})
