"""The identity of a run: everything that its releases rest on, and the one place that compares it.

With the noise of one step, two sums would reveal their difference. So a run that is repeated, goes
on after a restart, or is shared by several hosts must have the same

- draws: the sampler with its seed, N and owners;
- noise: the key, σ, B, and the correlation or schedule;
- sum: the traced program with its clip, its constants and frozen arrays, and JAX's settings;
- data: every record in its order.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from dpoptax._random.keys import words_of
from dpoptax._support.digests import digest_of, rows_digest, tree_digest
from dpoptax._support.fingerprints import key_fingerprint, seed_fingerprint
from dpoptax._support.host_communication import OtherRunError, check_same_on_hosts

if TYPE_CHECKING:
    from dpoptax._support.tree import PyTree
    from dpoptax.runs._plan_terms import PlanTerms
    from dpoptax.sampling._base import Sampler
    from dpoptax.users import UserTable

Values = Mapping[str, Any]
"""Values by the names that messages give them. Digests and fingerprints are `Hidden`."""

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
)


class Hidden(str):
    """A digest, which messages do not show."""


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Holds everything that the releases of a run rest on.

    Attributes:
      values: must be equal wherever the same noise is added. JSON values, or digests.
      rounding: decides only how sums are rounded, such as the kind of device. It may change between
        steps, but not in a step that is repeated after it was shown.
    """

    values: Values
    rounding: Values = dataclasses.field(default_factory=dict)

    def digest(self) -> str:
        """Returns a hash of all values except `rounding`."""
        return digest_of({name: json.dumps(value) for name, value in self.values.items()})

    def record(self) -> dict[str, Any]:
        """Returns JSON values to store in the folder of a run, for `check_continues`."""
        hidden = [name for name, value in self.values.items() if isinstance(value, Hidden)]
        return {"values": dict(self.values), "hidden": hidden, "rounding": dict(self.rounding)}

    def check_continues(self, record: Values, described_as: str, *, part: bool = False) -> None:
        """Raises unless the run is that of a `record`.

        Args:
          record: from the start of the run.
          described_as: the run in the message: "the first 5 steps of the run in FOLDER".
          part: whether this identity lacks values of the record, to refuse a start early.

        Raises:
          OtherRunError: a value has changed.
        """
        old, changes = record["values"], self._changes(record)
        also = f" These values also changed: {changes}." if changes else ""
        # Values that only the record has count as changed, unless this identity is partial.
        missing = [] if part else [name for name in old if name not in self.values]
        for name in (*missing, *self.values):
            before, now = old.get(name), self.values.get(name)
            if before == now:
                continue
            hidden = isinstance(now, Hidden) or name in record["hidden"]
            shown, got = ("the same", "another") if hidden else (f"{before!r},", repr(now))
            raise OtherRunError(
                f"{name} must be {shown} as in {described_as}, got {got}. The noise of a step "
                f"belongs to one sampler, one program and one data set.{also} "
                "Restore it to continue that run, or use another folder for a new run and account "
                "for both."
            )

    def check_rounding(self, record: Values, why: str) -> None:
        """Raises unless sums are rounded as in a `record`; `why` says why they must be.

        Raises:
          OtherRunError: a value has changed.
        """
        if changes := self._changes(record):
            raise OtherRunError(
                f"The arithmetic of a run must not change {why} These values changed: {changes}. "
                "Repeated steps would add the same noise to other sums. Restore the original "
                "arithmetic, or use another folder and account for both runs."
            )

    def check_same_on_hosts(self, data: "PyTree", **others: Any) -> None:
        """Raises on all hosts unless all have this identity, each record, and the other values."""
        every = {"The training examples in their order": Hidden(rows_digest(data))}
        check_same_on_hosts({**self.values, **self.rounding, **every, **others})

    def _changes(self, record: Values) -> str:
        old = record["rounding"]
        changed = [name for name, value in self.rounding.items() if value != old.get(name)]
        return ", ".join(f"{name} {old.get(name)!r} -> {self.rounding[name]!r}" for name in changed)


def draws_of(sampler: "Sampler", users: "UserTable | None") -> Values:
    """Returns the values that decide the draws of a run.

    The padding may follow the number of devices, so it is not part of it.
    """
    seed = sampler.seed
    return {
        "`sampler`": sampler.law,
        "The sampler's seed": Hidden(seed if seed is None else seed_fingerprint(seed)),
        "`sampler`, with its draws,": Hidden(digest_of(sampler.sample(0))),
        "`users`": Hidden(digest_of(None if users is None else vars(users))),
    }


def noise_of(plan: "PlanTerms", key: jax.Array) -> Values:
    """Returns the values that decide the noise of a run."""
    noise = plan.noise_multiplier
    return {
        "The noise key": Hidden(key_fingerprint(words_of(key))),
        "`batch_size`": plan.sampler.batch_size,
        "`noise_multiplier`": (
            {str(first): sigma for first, sigma in noise.items()}
            if isinstance(noise, Mapping)
            else noise
        ),
        "`strategy`": None if plan.strategy is None else repr(plan.strategy),
        "`steps` of correlated noise": None if plan.strategy is None else plan.steps,
        "`fixed_point`": plan.fixed_point,
    }


def data_of(data: "PyTree", frozen: "PyTree" = None, *, whole: bool = True) -> Values:
    """Returns digests of the data of a run; `whole` as for `rows_digest`."""
    found = {"The training examples": Hidden(rows_digest(data, whole=whole))}
    if frozen is not None:
        found["The frozen arrays"] = Hidden(tree_digest(frozen))
    return found


def settings() -> Values:
    """Returns JAX's settings that change sums by more than rounding, such as random numbers."""
    config: Any = jax.config
    return {f"`{name}`": getattr(config, name, None) for name in _SETTINGS}
