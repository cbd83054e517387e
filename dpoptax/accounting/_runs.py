"""Guarantees of runs, from an optimizer state or for a planned run."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dpoptax._pricing.checks import Accountant, check_delta
from dpoptax._pricing.noise_schedule import phases_of
from dpoptax._pricing.privacy_event import Composable, PrivacyEvent, other_events
from dpoptax._support.argument_checks import integer
from dpoptax.accounting._guarantee import Guarantee, NoisyReleases
from dpoptax.accounting._run_event import (
    Scheme,
    event_of,
    matching_sampler,
    run_event,
    sampler_of,
    scheme_of,
    spent_event,
)

if TYPE_CHECKING:
    from dpoptax._release.read_ledger import Ledger, LedgerReadings
    from dpoptax._support.tree import PyTree
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler


def guarantee(
    opt_state: "PyTree",
    sampler: "Sampler | Participation",
    *,
    delta: float | None = None,
    accountant: Accountant = "pld",
    same_batches: bool | None = None,
    also: Sequence[Composable] = (),
) -> Guarantee:
    """Returns the privacy guarantee of a run, from the ledgers in its optimizer state.

    The unit is that of the sampler. With a sampler from `dpoptax.users.UserTable.sampler`, the
    guarantee is about one user with all of its records.

    **Draws.** Each release is priced with a separate draw, `sampler.sample(t)` for t = 0, 1, … The
    ledgers do not show whether k releases used the same draw, which costs as much as one release
    with σ/√k.

    **Several noise stages.** The stages of one optimizer release sums over the *same* batches. With
    multipliers σ_1, σ_2, …, they are one release with (Σ σ_i⁻²)^(−1/2) per batch. Separate batches
    would cost less, except for δ of the order of B/N.

    **Ensembles.** If a step is mapped with `vmap`, the arrays of the state have a leading axis of
    runs. The guarantee is then for all runs together. It covers every use of several runs: their
    average, the best one, or all. `same_batches` is then required.

    Args:
      opt_state: contains the state of at least one noise stage. It may be a restored checkpoint or
        an `nnx.Optimizer`.
      sampler: the sampler that drew the batches, also as `strategy.under(sampler)`. Batch size and
        strategy must be those of the ledgers.
      delta: δ of the statement. By default, the largest power of ten below 1/N, at most 1e-5.
      accountant: "pld" or "rdp".
      same_batches: for several noise stages, True (the default) if every step updated all of them
        with one draw, and False if they took turns, with one stage for each draw. If the steps of
        the sampler depend on each other, as for groups that take turns, all releases are priced
        with the least multiplier: a record may meet only one stage. The same holds for the
        multipliers of a schedule. For an ensemble, True if its runs shared the batch of every step,
        and False if each run drew its own batches with its own seed. The stages of one run then
        share its batches.
      also: other releases on the same data, each with its own seed and noise key: guarantees of
        other runs, a `PrivacyEvent` such as that of the vocabulary selected by
        `dpoptax.tables.select_rows`, or events of dp_accounting. They are composed with the run,
        once for all runs.

    Raises:
      ValueError: the run and an event of `also`, or two of these, have the same sampler seed, the
        same noise key or different units; `opt_state` has no ledger, a ledger that refused a
        release, or one with arrays of another mechanism; two noise stages or runs have the same
        key; a mechanism has no privacy proof; the sampler has another batch size, has no event for
        this noise (correlated noise in fixed point needs a `CyclicPoissonSampler` whose cycle is as
        long as its bands), or has another strategy; correlated noise is combined with another noise
        stage; stages with different numbers of releases shared the batches of a sampler with
        dependent steps; or `same_batches` is missing for an ensemble.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(jnp.zeros(2), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> print(str(guarantee(state, sampler)).splitlines()[0])
    (2, 1e-05)-differentially private for one example more or less
    """
    from dpoptax._release.read_ledger import read_ledgers

    readings, others = read_ledgers(opt_state), other_events(also)
    sampler = matching_sampler(sampler, readings)
    return ledger_guarantee(readings, sampler, others, delta, accountant, same_batches)


def ledger_guarantee(
    readings: "LedgerReadings",
    sampler: "Sampler",
    others: Sequence[PrivacyEvent],
    delta: float | None,
    accountant: Accountant,
    same_batches: bool | None = None,
) -> Guarantee:
    """Returns the privacy guarantee of ledgers; the other arguments are checked by `guarantee`."""

    def event(most: int | None = None) -> PrivacyEvent:
        spent = spent_event(readings, sampler, same_batches=same_batches, most=most)
        return run_event(spent, sampler, others, readings.keys)

    ledgers = readings.ledgers
    # Nobody knows how stages that took turns divided the first steps of the run among them.
    in_turns = same_batches is False and len(ledgers) > 1 and not readings.ensemble
    releases, after = tuple(map(_noisy_releases, ledgers)), None if in_turns else event
    return _guarantee(sampler, delta, accountant, releases, others, event(), after)


def planned_guarantee(
    *,
    noise_multiplier: float | Mapping[int, float],
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
    also: Sequence[Composable] = (),
) -> Guarantee:
    """Returns the privacy guarantee of a planned run of `steps` noisy clipped sums.

    Args:
      noise_multiplier: standard deviation of the noise on the *sum*, over the clipping bound, or a
        schedule as for `dpoptax.gaussian_noise`. 0 gives no guarantee. If the steps of the sampler
        depend on each other, the least multiplier of a schedule is priced.
      steps: number of noisy releases. For statistics without a training, call
        `Guarantee([event, …])`.
      sampling_probability: the probability of each record in each step, for Poisson sampling under
        add-or-remove-one. Pass either this or `sampler`.
      sampler: the sampler of the batches, with its neighboring relation and unit. For correlated
        noise, `strategy.under(sampler)`.
      delta: δ of the statement. By default, the largest power of ten below 1/N, at most 1e-5.
      accountant: "pld" or "rdp".
      also: as for `guarantee`.

    Raises:
      ValueError: an argument is out of range; the sampler has no event; or its seed is also that
        of an event of `also`, or its unit is another one.

    Sources: Mironov, Talwar, Zhang, "Rényi differential privacy of the sampled Gaussian mechanism"
    (2019), with integrals at non-integer orders; Doroshenko et al., "Connect the dots" (2022), as
    implemented in dp_accounting.

    >>> planned = planned_guarantee(noise_multiplier=1.1, sampling_probability=0.01, steps=1000)
    >>> round(planned.epsilon(1e-5), 2), planned.epsilon_curve([0, 500, 1000], 1e-5).round(2)
    (1.52, array([0.  , 1.08, 1.52]))
    """
    others = other_events(also)
    scheme = scheme_of(sampling_probability, sampler)
    phases = phases_of(noise_multiplier)
    steps = integer("steps", steps, 0, "count the noisy releases")
    strategy = getattr(sampler, "strategy", None)
    releases = (NoisyReleases(steps, phases, strategy and repr(strategy)),)

    def event(count: int) -> PrivacyEvent:
        return run_event(event_of(scheme, [(count, phases)]), scheme, others)

    return _guarantee(scheme, delta, accountant, releases, others, event(steps), event)


def _guarantee(
    scheme: Scheme,
    delta: float | None,
    accountant: Accountant,
    releases: tuple[NoisyReleases, ...],
    others: Sequence[PrivacyEvent],
    event: PrivacyEvent,
    event_after: Callable[[int], PrivacyEvent] | None,
) -> Guarantee:
    """Returns the guarantee of an event, at a checked δ."""
    sampler = sampler_of(scheme)
    size = sampler.dataset_size
    if delta is None:
        # N has n digits, so 1/N is above 10⁻ⁿ.
        delta = 1e-5 if size is None else min(1e-5, 10.0 ** -len(str(size)))
    check_delta(delta, size)
    return Guarantee(
        event,
        sampler.neighboring_relation,
        accountant,
        sampler.unit or "example",
        sampler.describe(),
        releases,
        len(others),
        delta,
        event_after=event_after,
    )


def _noisy_releases(ledger: "Ledger") -> NoisyReleases:
    noise, generator = ledger.mechanism, ledger.generator
    strategy = None if noise.strategy is None else repr(noise.strategy)
    return NoisyReleases(ledger.releases, noise.phases, strategy, noise.fixed_point, generator)
