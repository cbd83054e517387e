"""The event of past releases, read from the ledgers of an optimizer state."""

from typing import TYPE_CHECKING, NamedTuple, cast

import dp_accounting as dpa

from dpoptax.accounting._design import check_sampler

if TYPE_CHECKING:
    from dpoptax._release.ledger import Mechanism
    from dpoptax._release.read_ledger import Ledger
    from dpoptax._support.tree import PyTree
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler


class LedgerReadings(NamedTuple):
    """Ledgers of an optimizer state.

    Attributes:
      runs: the ledgers of each run, one for each noise stage.
      ensemble: whether the state's arrays have a leading axis of runs.
      keys: fingerprints of the noise keys.
    """

    runs: "tuple[tuple[Ledger, ...], ...]"
    ensemble: bool
    keys: frozenset[str]


def read_ledgers(opt_state: "PyTree") -> LedgerReadings:
    """Returns the ledgers of a run, or of each run of an ensemble.

    Raises:
      ValueError: there is no ledger, or `dpoptax.ledgers` raises it.
    """
    from dpoptax._release.read_ledger import is_ensemble, key_fingerprints, ledgers, runs_of

    if is_ensemble(opt_state):
        runs = runs_of(opt_state)
        ledgers(runs)  # raises if two runs have one key
        each = tuple(ledgers(run) for run in runs)
        return LedgerReadings(each, ensemble=True, keys=key_fingerprints(runs))
    found = ledgers(opt_state)
    if not found:
        raise ValueError(
            "`opt_state` holds no noise ledger. Pass the state of a chain that starts with "
            "gaussian_noise or clip_and_noise. Restore a checkpoint into tx.init(params), which "
            "gives its arrays their meaning."
        )
    return LedgerReadings((found,), ensemble=False, keys=key_fingerprints(opt_state))


def drawing_sampler(sampler: "Sampler | Participation", readings: LedgerReadings) -> "Sampler":
    """Returns the sampler that drew the batches, without a strategy.

    Raises:
      TypeError: `sampler` is not a sampler.
      ValueError: the strategy of `sampler` is not that of the ledgers.
    """
    check_sampler(sampler)
    strategy = getattr(sampler, "strategy", None)
    if strategy is None:
        return cast("Sampler", sampler)
    strategies = {ledger.mechanism.strategy for run in readings.runs for ledger in run}
    if strategies != {strategy}:
        raise ValueError(
            f"`sampler` must have the strategy of the noise stage, {[*strategies]}, got "
            f"{strategy}. Pass the sampler that drew the batches; the ledgers hold the "
            "strategy."
        )
    return cast("Participation", sampler).sampler


def spent_event(
    readings: LedgerReadings,
    sampler: "Sampler | Participation",
    *,
    same_batches: bool | None = None,
    noise: float = 1.0,
    most: int | None = None,
) -> dpa.DpEvent:
    """Returns the event of the releases of a run or of an ensemble.

    Args:
      readings: from `read_ledgers`.
      sampler: as for `guarantee`.
      same_batches: as for `guarantee`.
      noise: a factor on all noise multipliers, to price the run with other noise.
      most: if given, only this many first releases of each ledger count.
    """
    runs, sampler = readings.runs, drawing_sampler(sampler, readings)
    ledgers = [ledger for run in runs for ledger in run]
    for ledger in ledgers:
        _check(ledger.mechanism, sampler)
    mechanism = ledgers[0].mechanism
    if readings.ensemble or len(ledgers) > 1 or mechanism.schedule or mechanism.strategy:
        from dpoptax.accounting._joint_releases import joint_event

        return joint_event(readings, sampler, same_batches=same_batches, noise=noise, most=most)
    releases = ledgers[0].releases if most is None else min(ledgers[0].releases, most)
    return sampler.dp_event(noise * mechanism.noise_multiplier, releases)


def _check(mechanism: "Mechanism", sampler: "Sampler") -> None:
    """Raises if no ε is known for a mechanism, or if another sampler drew its batches."""
    if mechanism.unproven is not None:
        raise ValueError(
            "`opt_state` was made by a mechanism without a privacy proof, so no ε is stated: "
            f"{mechanism.unproven}."
        )
    if mechanism.batch_size != sampler.batch_size:
        raise ValueError(
            f"`sampler.batch_size` must be the noise stage's, {mechanism.batch_size:g}, got "
            f"{sampler.batch_size}. Pass the sampler that drew this run's batches."
        )
