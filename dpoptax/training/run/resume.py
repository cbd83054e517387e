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
            f"workdir={str(workdir)!r} holds the metrics of a run and no checkpoint of it. A "
            "fresh start would forget the earlier releases: give another workdir, or "
            "remove these files if they do not matter"
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
                f"the run has shown step {left_out[0]}, and would go on without evaluating it: "
                "whether it comes to the same metrics again would stay unknown, and "
                "fixed_point=True promises ε against an adversary who sees every bit; give an "
                f"eval_every that divides {left_out[0]}"
            )
        passed = record["step"]
        before = earlier.get(record["step"], {})
        now = records.plain(record)
        names = now.keys() & before.keys() - {"seconds", "epsilon"}
        if any(now[name] != before[name] for name in names):
            raise ConfigError(
                f"the run has shown step {record['step']}, and does not come to the same metrics "
                "again: it computes with another rounding, and fixed_point=True promises ε "
                "against an adversary who sees every bit. Go on with the machine, the flags and "
                "the test split that it began with; or give another workdir and count both runs"
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
                f"{field}={now!r} differs from {before!r}, with which the run in {workdir} made "
                f"its first {record['step']} steps; give {field}={before!r} to go on with it, or "
                "another workdir for a new run"
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
            f"steps={steps} ends the run before step {shown}, whose metrics it has "
            "shown: the stated epsilon would be that of fewer steps than were released; give "
            f"steps={shown} or more"
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
        f"the run has shown step {shown} and would go on from step {record['step']} with other "
        f"arithmetic ({others}): steps run again would add the same noise to other sums. Go on "
        "with the arithmetic that it began with, or give another workdir and count both runs"
    )


def check_same_on_hosts(identity: Identity) -> None:
    """Raises if hosts have another config, seed or data: a record could be in two parts.

    Or other versions, which may draw other noise for the same sum.
    """
    if not devices.same_on_all_hosts(repr((identity, identity.secrets))):
        raise ConfigError(
            "the hosts of this run do not have the same config, seed and training examples, or not "
            "the same versions: each would draw or read other records, and one could be twice in a "
            "batch; give all of them the same config, files and packages"
        )


def _check_same_data(record: dict[str, Any], now: str) -> None:
    """Raises if the begun run had other examples or owners, or another published model."""
    if record.get("data") != now:
        raise ConfigError(
            "the training examples, whose they are, or the weights of the published model differ "
            f"from those of the run's first {record['step']} steps: no ε holds for two data sets "
            "in one run, and steps that are run again would add the same noise to other gradients; "
            "give the old ones (data_dir, pretrained), or another workdir for a new run"
        )


def _check_ledger(record: dict[str, Any], opt_state: Any) -> None:
    """Raises if the restored ledger is not that of the record: a checkpoint mixed from two."""
    for ledger, stored in zip(dpoptax.ledgers(opt_state), record["ledgers"], strict=True):
        restored = _ledger(ledger)
        if restored != stored or ledger.releases != record["step"]:
            raise ConfigError(
                f"the checkpoint of step {record['step']} holds the ledger {restored} and records "
                f"{stored}: it is damaged; remove it, and the run goes on from the one before"
            )


def _ledger(ledger: dpoptax.extend.Ledger) -> dict[str, Any]:
    return records.plain({**dataclasses.asdict(ledger.mechanism), "releases": ledger.releases})
