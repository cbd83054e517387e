"""Reads the folder of a run, and checks that the run may resume there."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import dpoptax
from dpoptax.runs import FLOAT_TOTALS, OtherRunError, RunIdentity, differing
from dpoptax.sampling import Sampler
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints

METRICS = "metrics.jsonl"
"""Name of the file with a line for each evaluation of a run."""


def read_record(checkpoints: Checkpoints, workdir: Path) -> dict[str, Any] | None:
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


def check_continues(
    identity: RunIdentity, record: Mapping[str, Any], workdir: Path, *, part: bool = False
) -> None:
    """Raises if an identity, or a part of it, is not that of the run in a folder."""
    described_as = f"the first {record['step']:,} steps of the run in {workdir}"
    identity.check_continues(record["identity"], described_as, part=part)


def shown_records(metrics: Path) -> dict[int, dict[str, Any]]:
    """Reads the records that earlier starts of the run have shown, by step.

    Raises:
        CheckpointError: Hosts see other records. They would not evaluate together.
    """
    found = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError):  # a killed run may leave a part of a line
            record = json.loads(line)
            found[record["step"]] = record
    if differing({"records": repr(found)}):
        raise CheckpointError(
            f"All hosts must see the same {metrics}. Use a workdir on a disk that they share."
        )
    return found


def rounding(sampler: Sampler, mesh: Mesh | None, *, exact: bool) -> dict[str, Any]:
    """Returns the values that decide how the sums of a run are rounded.

    These are the rows of a batch and the number of devices above eight, which lower the clipping
    bound slightly; the kind of device; and the package versions. If every bit counts (`exact`),
    they include any number of devices and hosts, which change the order of additions.
    """
    shards = 1 if mesh is None else mesh.size
    rows = -(-sampler.padded_size // shards) * shards
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return {
        "rows": rows,
        "devices": shards if exact else max(shards, FLOAT_TOTALS),
        **({"hosts": jax.process_count()} if exact else {}),
        "kind of device": device.device_kind,
        **files.versions(),
    }


def check_restored(
    identity: RunIdentity,
    record: dict[str, Any],
    opt_state: Any,
    *,
    steps: int,
    shown: int,
    exact: bool,
) -> None:
    """Raises if the run must not resume from a restored checkpoint.

    Shown steps are repeated only if a checkpoint was removed. Both releases would have the same
    noise, so their difference would reveal a change of rounding. If every bit counts, no shown step
    is repeated, since compiler flags may round differently too, and two copies of a run must not
    round differently.

    Args:
        identity: That of the current start, which continues the run.
        record: Record of the checkpoint.
        opt_state: Optimizer state of the checkpoint.
        steps: Number of permitted steps now.
        shown: The last step whose metrics an earlier start has shown.
        exact: Whether the guarantee holds for every bit, so that rounding must not change.
    """
    step, stored = record["step"], record["identity"]
    found = [ledger.releases for ledger in dpoptax.ledgers(opt_state)]
    if any(releases != step for releases in found):
        raise ConfigError(
            f"The checkpoint of step {step} is damaged, because its ledgers count {found} "
            "releases. Remove it to continue from the previous checkpoint."
        )
    if shown > step and exact:
        raise OtherRunError(
            f"A step that was shown must not be repeated with fixed_point=True, got step {shown} "
            f"and a last checkpoint of step {step}. Sums that are rounded differently would get "
            "the same noise. Restore the removed checkpoint from a backup, or use another folder "
            "and account for both runs."
        )
    if shown > step:
        identity.check_rounding(
            stored,
            f"after its metrics were shown. Step {shown} was shown, the last checkpoint is of step "
            f"{step}.",
        )
    if exact:
        identity.check_rounding(stored, "with fixed_point=True.")
    if max(step, steps) < shown:  # the stated ε would not cover all released steps
        raise OtherRunError(
            f"`steps` must be at least {shown}, the last step whose metrics the run has shown, got "
            f"{steps}. The stated ε would cover fewer steps than were released."
        )
