"""A run's guarantee in words: with its ε all that an ε alone leaves open."""

import dataclasses
import decimal
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting as dpa

from dpoptax._pricing.checks import Accountant
from dpoptax.accounting._spent import epsilon_spent
from dpoptax.accounting._trade_offs import gdp_spent, trade_off_spent

if TYPE_CHECKING:
    from dpoptax._noise.ledger import Mechanism
    from dpoptax._noise.read_ledger import Ledger
    from dpoptax._tree import PyTree
    from dpoptax.sampling import Sampler
    from dpoptax.sampling._base import Unit

_NEIGHBOURS = {
    "add-or-remove-one": "one {} more or less",
    "replace-one": "one {} replaced by another",
    "replace-special": "one {} replaced by one that adds nothing",
}
_UNITS = {"example": "example", "user": "user with all of its records"}
_ACCOUNTED = {
    "pld": "by privacy loss distributions",
    "rdp": "by Rényi divergences",
    "monte_carlo": "by Monte Carlo, whose chance to be wrong is in δ",
}
_GENERATORS = {"threefry": "threefry", "chacha20": "ChaCha20"}
_ACCUSED = 0.01
_FEW = 4  # phases of a schedule that are listed


@dataclasses.dataclass(frozen=True)
class Statement:
    """What a run promises. Printing it says so for people; `to_dict` is for machines.

    Attributes:
      epsilon: spent; infinity where nothing is promised.
      delta: that it holds with.
      unit: whose data it protects, "example" or "user"; the sampler's unit.
      neighbouring_relation: which data sets are neighbours.
      ledgers: the releases of each noise stage.
      sampling: how batches were drawn, `sampler.describe()`.
      accountant: what ε was found by.
      found: the largest fraction of the units in the data that any attack finds while it accuses
        1 % of those that are not, by `trade_off_spent`.
      mu: the least μ of Gaussian differential privacy, but for δ, by `gdp_spent`.
      others: number of events beside the run that are part of the above.
    """

    epsilon: float
    delta: float
    unit: "Unit"
    neighbouring_relation: str
    ledgers: "tuple[Ledger, ...]"
    sampling: Mapping[str, object]
    accountant: Accountant
    found: float
    mu: float
    others: int = 0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values; strategies of correlated noise as text."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        releases = [_plain(ledger) for ledger in self.ledgers]
        return {**values, "ledgers": releases, "sampling": dict(self.sampling)}

    def __str__(self) -> str:
        neighbours = _NEIGHBOURS[self.neighbouring_relation].format(_UNITS[self.unit])
        if not math.isfinite(self.epsilon):
            return f"not private: no ε holds at δ = {_delta(self.delta)} for {neighbours}"
        drawn = self.sampling
        exact = all(ledger.mechanism.fixed_point for ledger in self.ledgers)
        lines = {
            "releases": "; ".join(_releases(ledger) for ledger in self.ledgers),
            "batches": f"{drawn['batch_size']:,} expected of {drawn['dataset_size']:,} {self.unit}s"
            f", drawn by {drawn['sampling']}",
            "random": f"noise by {_generators(self.ledgers)}, batches by {drawn['generator']}",
            "accounted": _ACCOUNTED[self.accountant]
            + (f", with {self.others} other releases of the data" if self.others else ""),
            "attacks": f"find at most {_up(100 * self.found)} % of the {self.unit}s where they "
            f"accuse {100 * _ACCUSED:g} % of all others; μ = {_up(self.mu)}",
            "holds": "for every bit of a release"
            if exact
            else "for real numbers, and so not for the last bits of a release",
            "secret": "noise key and sampler's seed, and what holds them, as checkpoints do",
            "left out": "what was chosen by private results, or published beside the releases",
        }
        width = max(map(len, lines)) + 2
        head = (
            f"({_up(self.epsilon)}, {_delta(self.delta)})-differentially private for {neighbours}"
        )
        return "\n".join([head, *(f"  {name:{width}}{text}" for name, text in lines.items())])


def statement(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool = True,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
) -> Statement:
    """Returns the privacy statement of a run: ε, and everything that an ε alone leaves open.

    An ε holds at a δ, for a unit (an example or a user), for a neighboring relation and for a
    sampling scheme, and one of several accountants computed it. The statement has all of these
    from the sampler and from the ledgers in the optimizer state. It prints ε and δ rounded up and
    noise multipliers rounded down. It cannot know what was chosen by looking at private results,
    or what else was published.

    The unit is that of the sampler: one from `dpoptax.users.UserTable.sampler` draws users, and
    the statement is then about one user with all of its records.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      delta: in (0, 1).
      same_batches: as for `epsilon_spent`.
      accountant: as for `epsilon_spent`; attacks are by "pld" whatever it is.
      also: as for `epsilon_spent`.

    Raises:
      ValueError: as `epsilon_spent` and `gdp_spent`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(dpoptax.gradient_points((), jnp.zeros(2)), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> print(str(statement(state, sampler, delta=1e-5)).splitlines()[0])
    (2, 1e-05)-differentially private for one example more or less
    """
    from dpoptax._noise.read_ledger import ledgers

    epsilon = epsilon_spent(
        opt_state, sampler, delta, same_batches=same_batches, accountant=accountant, also=also
    )
    spent: dict[str, Any] = {"same_batches": same_batches, "also": also}
    return Statement(
        epsilon=epsilon,
        delta=delta,
        unit=sampler.unit,
        neighbouring_relation=sampler.neighbouring_relation,
        ledgers=ledgers(opt_state),
        sampling=sampler.describe(),
        accountant=accountant,
        found=1.0 - float(trade_off_spent(opt_state, sampler, **spent)(_ACCUSED)),
        mu=gdp_spent(opt_state, sampler, delta, **spent),
        others=len(also),
    )


def _releases(ledger: "Ledger") -> str:
    mechanism = ledger.mechanism
    noise = f"{ledger.releases:,} of the Gaussian mechanism, noise {_multipliers(mechanism)}"
    return noise if mechanism.strategy is None else f"{noise}, correlated by {mechanism.strategy}"


def _multipliers(mechanism: "Mechanism") -> str:
    if mechanism.schedule is None:
        return f"multiplier {_down(mechanism.noise_multiplier)}"
    phases = [f"{_down(sigma)} from step {first} on" for first, sigma in mechanism.schedule]
    if len(phases) > _FEW:
        phases = [*phases[: _FEW - 1], "…", phases[-1]]
    return f"multipliers {', '.join(phases)}"


def _generators(ledgers: "Sequence[Ledger]") -> str:
    return " and ".join(sorted({_GENERATORS[ledger.generator] for ledger in ledgers}))


def _plain(ledger: "Ledger") -> dict[str, Any]:
    values = dataclasses.asdict(ledger.mechanism)
    strategy = ledger.mechanism.strategy
    return {
        **values,
        "strategy": None if strategy is None else repr(strategy),
        "releases": ledger.releases,
        "generator": ledger.generator,
    }


def _down(sigma: float) -> str:
    """A noise multiplier to six digits, rounded down."""
    return _six_digits(sigma, decimal.ROUND_FLOOR)


def _delta(delta: float) -> str:
    """A δ to six digits, rounded up."""
    return _six_digits(delta, decimal.ROUND_CEILING)


def _six_digits(value: float, rounding: str) -> str:
    with decimal.localcontext(prec=6, rounding=rounding):
        return f"{float(+decimal.Decimal(repr(float(value)))):g}"


def _up(value: float, digits: int = 3) -> str:
    """A number of at least 0 to so many digits, rounded up."""
    exact = decimal.Decimal(repr(float(value)))
    if not exact.is_finite() or not exact:
        return f"{value:g}"
    unit = decimal.Decimal(1).scaleb(exact.adjusted() + 1 - digits)
    rounded = exact.quantize(min(unit, decimal.Decimal(1)), rounding=decimal.ROUND_CEILING)
    return f"{rounded.normalize():f}"
