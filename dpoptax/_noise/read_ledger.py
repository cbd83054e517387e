"""Ledgers as they are read: from an optimizer's state, where all of it agrees."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._noise.ledger import (
    CHANGED_SUM,
    EDITED,
    OTHER_KEY,
    OTHER_MECHANISM,
    TOO_MANY,
    LedgerState,
    Mechanism,
    check_imprint,
    imprint_of,
    is_ledger,
    refusals_so_far,
)
from dpoptax._random.keys import Generator, generator_of
from dpoptax._tree import PyTree, strip_variables

_REASONS = {
    CHANGED_SUM: "the clipped sum was changed on its way to the noise stage (scaled, added to "
    "another, given another clip or reference), so that the clip's bound did not hold for it; or "
    "its rows were selected for another release",
    OTHER_MECHANISM: "its arrays are those of another mechanism: they were restored into a chain "
    "with another noise multiplier, schedule, batch size or strategy",
    OTHER_KEY: "its key is not the one that it was begun with",
    EDITED: "its integers do not belong together: it was averaged with another, or edited",
    TOO_MANY: "it counts at most 2³¹ − 1 releases, and more would have had the noise of the last",
}


class Ledger(NamedTuple):
    """The releases that an optimizer's state accounts for, as Python values.

    Attributes:
      mechanism: the `Mechanism` of each release.
      releases: how many there were.
      generator: of the noise, which the key decides: "threefry" or "chacha20".
    """

    mechanism: Mechanism
    releases: int
    generator: Generator = "threefry"


def ledgers(opt_state: PyTree) -> tuple[Ledger, ...]:
    """Returns the ledger of every noise stage in an optimizer's state, in tree order.

    Reads the arrays from the device, and compares them with each other and with the mechanisms that
    the state's structure names. An empty tuple means that nothing in the state adds noise.

    Args:
      opt_state: an optimizer's state, or any pytree around it, such as a restored checkpoint.

    Raises:
      TypeError: a state that is traced, inside of `jit`.
      ValueError: a ledger that refused a release, and why; arrays that are another mechanism's, key
        or ledger's; two stages with one key; a state of several runs, as `vmap` makes, which
        `dpoptax.accounting.guarantee` prices; a state of a version without imprints.
    """
    states = _states_in(opt_state)
    found: dict[bytes, int] = {}
    for i, state in enumerate(states):
        check_imprint(state)
        if isinstance(state.count, jax.core.Tracer):
            raise TypeError(
                "a ledger is read as Python values, and this one is traced: call ledgers and "
                "epsilon_spent outside of jit, with the state that the step returned"
            )
        if jnp.shape(state.count) != ():
            raise ValueError(
                f"a ledger's count has shape {jnp.shape(state.count)}: these are the states of "
                "several runs, and who sees them all learns from each. Price them together with "
                "dpoptax.accounting.guarantee(..., same_batches=...)"
            )
        _raise_refusals(state)
        key = np.asarray(imprint_of(state).key).tobytes()
        if key in found:
            raise ValueError(
                f"noise stages {found[key]} and {i} of the state have one key: their noise is the "
                "same, so that the difference of their releases has none. Give each a key of its "
                "own, as from jax.random.split; no epsilon holds for these releases"
            )
        found[key] = i
    return tuple(
        Ledger(state.mechanism, int(state.count), generator_of(state.key)) for state in states
    )


def _states_in(opt_state: PyTree) -> list[LedgerState]:
    """The states of noise stages; arrays for the variables that `nnx.Optimizer` makes of them."""
    leaves = jax.tree.leaves(strip_variables(opt_state), is_leaf=is_ledger)
    return [leaf for leaf in leaves if is_ledger(leaf)]


def is_ensemble(opt_state: PyTree) -> bool:
    """Returns whether the state's ledgers have a leading axis, that of an ensemble's runs."""
    return any(jnp.ndim(state.count) for state in _states_in(opt_state))


def runs_of(opt_state: PyTree) -> list[PyTree]:
    """The states of an ensemble's runs, from one whose arrays have the runs as leading axis."""
    states = _states_in(opt_state)
    for state in states:
        check_imprint(state)
    shapes = {jnp.shape(state.count) for state in states}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(
            f"the ledgers' counts have shapes {sorted(shapes)}: want the state of an ensemble, one "
            "leading axis over its runs"
        )
    return [
        [jax.tree.map(lambda x, i=i: x[i], state) for state in states]
        for i in range(next(iter(shapes))[0])
    ]


def _raise_refusals(state: LedgerState) -> None:
    bits = refusals_so_far(state)
    if not bits:
        return
    reasons = [reason for bit, reason in _REASONS.items() if bits & bit]
    if bits & OTHER_MECHANISM:
        sigma, size = np.asarray(imprint_of(state).values)[:4].view(np.float64)
        mechanism = state.mechanism
        reasons.append(
            f"they say noise_multiplier={sigma:g}, batch_size={size:g}, and the chain "
            f"noise_multiplier={mechanism.noise_multiplier:g}, batch_size={mechanism.batch_size:g}"
        )
    raise ValueError(
        f"no epsilon holds for this noise state: {'; '.join(reasons)}. From then on its releases "
        "are NaN; take the last state before that, with the chain that made it, or start anew with "
        "tx.init and count both runs"
    )
