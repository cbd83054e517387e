"""Guarantees of runs: from an optimizer state, and from the parameters of a planned run."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting as dpa

from dpoptax._pricing.checks import Accountant, check_accountant, check_delta, integer
from dpoptax._pricing.events import with_others
from dpoptax.accounting._design import checked_noise, make_design
from dpoptax.accounting._guarantee import Guarantee, NoisyReleases
from dpoptax.accounting._spent import read_ledgers, spent_event
from dpoptax.matrix._participation import Participation

if TYPE_CHECKING:
    from dpoptax._noise.read_ledger import Ledger
    from dpoptax._tree import PyTree
    from dpoptax.sampling import Sampler


def guarantee(
    opt_state: "PyTree",
    sampler: "Sampler",
    *,
    delta: float | None = None,
    accountant: Accountant = "pld",
    same_batches: bool | None = None,
    also: Sequence[dpa.DpEvent] = (),
) -> Guarantee:
    """Returns the privacy guarantee of a run, from the ledgers in its optimizer state.

    The unit is the sampler's: one from `dpoptax.users.UserTable.sampler` draws users, and the
    guarantee is then about one user with all of its records.

    **Draws.** Each release is priced with a separate draw, `sampler.sample(t)` for t = 0, 1, … The
    ledgers do not show whether k releases had the same draw, which cost as much as one with σ/√k.

    **Several noise stages.** Those of one optimizer release sums over the *same* batches: with
    multipliers σ_1, σ_2, …, they are one release with (Σ σ_i⁻²)^(−1/2) per batch. Fresh batches
    would cost less, except for δ of the order of B/N.

    **Ensembles.** A state whose arrays have a leading axis of runs, which `vmap` makes of one step,
    gets the guarantee of all runs together. It covers every use of more than one run: their
    average, the best one, or all. `same_batches` is then required.

    Args:
      opt_state: holds at least one noise stage's state. It may be a restored checkpoint or an
        `nnx.Optimizer`.
      sampler: the one that drew the batches; its batch size must be the ledgers'.
      delta: δ of the statement. By default, the largest power of ten below 1/N, at most 1e-5.
      accountant: "pld", "rdp" or "monte_carlo".
      same_batches: whether several noise stages were updated on the same draws, step by step; by
        default they were. Otherwise they took turns: one of them released each draw. If a
        sampler's steps depend on each other, as turns of groups do, all are priced with the least
        of the multipliers, since a record may meet only one stage; so are those of a schedule.
        For an ensemble, whether its runs shared the batch of every step. Otherwise each run drew
        its own batches with its own seed. The stages of one run then share theirs.
      also: other events on the same data, such as the vocabulary that
        `dpoptax.tables.select_rows` selected; composed with the run, once for all runs.

    Raises:
      ValueError: no ledger, one that refused a release, or one with another mechanism's arrays; two
        noise stages or runs with one key; a mechanism without a proof; a sampler of another batch
        size, or without an event for the mechanism's noise (in fixed point, correlated noise needs
        a `CyclicPoissonSampler` whose cycle is as long as its bands); a strategy under a sampler as
        the sampler; correlated noise next to another noise stage; noise stages with different
        numbers of releases whose same batches were drawn together; an ensemble without
        `same_batches`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(jnp.zeros(2), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> print(str(guarantee(state, sampler)).splitlines()[0])
    (2, 1e-05)-differentially private for one example more or less
    """
    check_accountant(accountant)
    readings = read_ledgers(opt_state)

    def event(most: int | None = None) -> dpa.DpEvent:
        spent = spent_event(readings, sampler, same_batches=same_batches, most=most)
        return with_others(spent, also)

    ledgers = [ledger for run in readings.runs for ledger in run]
    in_turns = same_batches is False and len(ledgers) > 1 and not readings.ensemble
    return Guarantee(
        event=event(),
        accountant=accountant,
        releases=tuple(map(_noisy_releases, ledgers)),
        other_events=len(also),
        event_after=None if in_turns else event,
        **_sampler_facts(sampler, delta),
    )


def planned_guarantee(
    *,
    noise_multiplier: float | Mapping[int, float],
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
) -> Guarantee:
    """Returns the privacy guarantee of a run before it begins: of `steps` noisy clipped sums.

    Args:
      noise_multiplier: standard deviation of the noise on the *sum*, over the clipping bound. 0
        gives no guarantee. Or a schedule, as for `dpoptax.gaussian_noise`; if a sampler's steps
        depend on each other, the least multiplier is priced.
      steps: number of noisy releases.
      sampling_probability: of each record in each step, for Poisson sampling under
        add-or-remove-one. Pass either this or `sampler`.
      sampler: how batches are drawn, under which neighboring relation, and of which unit. For
        correlated noise, `strategy.under(sampler)`.
      delta: δ of the statement. By default, the largest power of ten below 1/N, at most 1e-5.
      accountant: "pld", "rdp" or "monte_carlo".
      also: as for `guarantee`.

    Raises:
      ValueError: an argument is out of range, or the sampler has no event.

    >>> planned = planned_guarantee(noise_multiplier=1.1, sampling_probability=0.01, steps=1000)
    >>> round(planned.epsilon(1e-5), 2), planned.epsilon_curve([0, 500, 1000], 1e-5).round(2)
    (1.52, array([0.  , 1.1 , 1.52]))
    """
    check_accountant(accountant)
    design = make_design(sampling_probability, sampler)
    multiplier = checked_noise(noise_multiplier)
    steps = integer("steps", steps, 0, "count the noisy releases")
    phases = multiplier if isinstance(multiplier, tuple) else ((0, multiplier),)
    strategy: str | None = None
    if isinstance(sampler, Participation):
        strategy, sampler = repr(sampler.strategy), sampler.sampler

    def event(count: int) -> dpa.DpEvent:
        return with_others(design.event(multiplier, count), also)

    return Guarantee(
        event=event(steps),
        accountant=accountant,
        releases=(NoisyReleases(steps, phases, strategy),),
        other_events=len(also),
        event_after=event,
        **_sampler_facts(sampler, delta, sampling_probability),
    )


def epsilon_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool | None = None,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
) -> float:
    """Returns ε that a run has spent, from the ledgers in its optimizer state.

    It is `guarantee(...).epsilon(delta)`, with the arguments and errors of `guarantee`.
    """
    return guarantee(
        opt_state,
        sampler,
        delta=delta,
        accountant=accountant,
        same_batches=same_batches,
        also=also,
    ).stated_epsilon


def epsilon(
    *,
    noise_multiplier: float | Mapping[int, float],
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    accountant: Accountant = "pld",
) -> float:
    """Returns ε of `steps` noisy clipped sums at a δ, an upper bound; 0 for no steps.

    It is `planned_guarantee(...).epsilon(delta)`, with the arguments and errors of
    `planned_guarantee`.

    Sources: Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian
    mechanism" (2019), with integrals for orders that are not integers; Doroshenko et al., "Connect
    the dots" (2022), as implemented in dp_accounting.

    >>> round(epsilon(noise_multiplier=1.1, sampling_probability=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    return planned_guarantee(
        noise_multiplier=noise_multiplier,
        steps=steps,
        sampling_probability=sampling_probability,
        sampler=sampler,
        delta=delta,
        accountant=accountant,
    ).stated_epsilon


def _sampler_facts(
    sampler: "Sampler | None", delta: float | None, sampling_probability: float | None = None
) -> dict[str, Any]:
    """Returns the fields of a guarantee that follow from the sampler, and δ of its statement."""
    if sampler is None:
        delta = 1e-5 if delta is None else delta
        check_delta(delta)
        sampling = {"sampling_probability": sampling_probability}
        return {"sampling": sampling, "stated_delta": delta}
    size = sampler.dataset_size
    delta = min(1e-5, 10.0 ** -len(str(size))) if delta is None else delta
    check_delta(delta, size)
    return {
        "neighboring_relation": sampler.neighboring_relation,
        "unit": sampler.unit,
        "sampling": sampler.describe(),
        "stated_delta": delta,
    }


def _noisy_releases(ledger: "Ledger") -> NoisyReleases:
    mechanism = ledger.mechanism
    return NoisyReleases(
        number=ledger.releases,
        phases=mechanism.schedule or ((0, mechanism.noise_multiplier),),
        strategy=None if mechanism.strategy is None else repr(mechanism.strategy),
        fixed_point=mechanism.fixed_point,
        generator=ledger.generator,
    )
