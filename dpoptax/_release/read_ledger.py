"""Reads the ledgers of an optimizer's state."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._points.points import POINTS_REMEDY, unused_trackers
from dpoptax._random.keys import Generator, generator_of, words_of
from dpoptax._release.ledger import (
    EDITED,
    OTHER_KEY,
    OTHER_MECHANISM,
    TOO_MANY,
    Mechanism,
    NoiseState,
    check_imprint,
    is_noise_state,
    refusals_so_far,
)
from dpoptax._support.fingerprints import key_fingerprint
from dpoptax._support.tree import PyTree, strip_variables

_REASONS = {
    OTHER_MECHANISM: "its arrays belong to another mechanism, because they were restored into a "
    "chain with another noise multiplier, schedule, batch size, strategy or sampler",
    OTHER_KEY: "its key is not the key that it was created with",
    EDITED: "its integers are inconsistent, because it was edited or averaged with another state",
    TOO_MANY: "it can count at most 2³¹ − 1 releases, and later releases would reuse noise",
}


class Ledger(NamedTuple):
    """Describes the releases of one noise stage, as Python values.

    Attributes:
      mechanism: the `Mechanism` of each release.
      releases: the number of releases.
      generator: the random generator of the noise, determined by the key: "threefry" or "chacha20".
    """

    mechanism: Mechanism
    releases: int
    generator: Generator = "threefry"


def ledgers(opt_state: PyTree) -> tuple[Ledger, ...]:
    """Returns the ledger of every noise stage in an optimizer's state, in tree order.

    The function reads the arrays from the device, and compares them with each other and with the
    mechanisms in the state's structure. An empty tuple means that no stage in the state adds noise.

    It warns if a method in the state, such as `disk`, has no effect because the gradients of the
    last release were not taken at its points. `dpoptax.extend.chain` raises an error instead.

    Args:
      opt_state: an optimizer's state, or any pytree that contains it, such as a restored
        checkpoint.

    Raises:
      TypeError: the state is traced, as inside `jit`.
      ValueError: a ledger refused a release, with the reason; arrays belong to another mechanism,
        key or ledger; two stages have the same key; or the state has a leading axis of several
        runs, as with `vmap` (see `dpoptax.accounting.guarantee`).
    """
    states = states_in(opt_state)
    found: dict[bytes, int] = {}
    for i, state in enumerate(states):
        check_imprint(state)
        if isinstance(state.count, jax.core.Tracer):
            raise TypeError(
                "The ledger must be concrete, got a traced state. Call `ledgers` and "
                "`guarantee` outside `jit`, with the state that the step returned."
            )
        if jnp.shape(state.count) != ():
            raise ValueError(
                f"The ledger's count must be a scalar, got shape {jnp.shape(state.count)}. These "
                "are the states of several runs, whose privacy costs add up. Price them together "
                "with `dpoptax.accounting.guarantee(..., same_batches=...)`."
            )
        # After this check, the fingerprints compared below are those of the keys in use.
        _check_refusals(state)
        key = np.asarray(state.imprint.key).tobytes()
        if key in found:
            raise ValueError(
                f"Noise stages {found[key]} and {i} of the state must have different keys. Their "
                "noise is the same and cancels in the difference of their releases, which are "
                "therefore not private. Start a new run with keys from `jax.random.split`."
            )
        found[key] = i
    _warn_about_points(opt_state)
    return tuple(
        Ledger(state.mechanism, int(state.count), generator_of(state.key)) for state in states
    )


class LedgerReadings(NamedTuple):
    """Ledgers of an optimizer state.

    Attributes:
      runs: the ledgers of each run, one for each noise stage.
      ensemble: whether the state's arrays have a leading axis of runs.
      keys: fingerprints of the noise keys.
    """

    runs: tuple[tuple[Ledger, ...], ...]
    ensemble: bool
    keys: frozenset[str]

    @property
    def ledgers(self) -> list[Ledger]:
        """The ledgers of the noise stages of all runs."""
        return [ledger for run in self.runs for ledger in run]


def read_ledgers(opt_state: PyTree) -> LedgerReadings:
    """Returns the ledgers of a run, or of each run of an ensemble.

    Raises:
      ValueError: the state has no ledger, or `ledgers` raises it.
    """
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


def states_in(opt_state: PyTree) -> list[NoiseState]:
    """Returns the states of noise stages, with variables of `nnx` as arrays."""
    leaves = jax.tree.leaves(strip_variables(opt_state), is_leaf=is_noise_state)
    return [leaf for leaf in leaves if is_noise_state(leaf)]


def _warn_about_points(opt_state: PyTree) -> None:
    """Warns if a method's points were not used in the last release."""
    opt_state = strip_variables(opt_state)
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_noise_state)
    releases = [(path, int(x.imprint.points)) for path, x in leaves if is_noise_state(x)]
    unused = unused_trackers(opt_state, releases)
    if unused:
        warnings.warn(
            f"The gradients of the last release were not taken at the points of {unused}. The "
            f"guarantee holds, but gradients must be taken at a method's points, {POINTS_REMEDY}",
            stacklevel=3,
        )


def key_fingerprints(opt_state: PyTree) -> frozenset[str]:
    """Returns the fingerprints of the noise keys of all stages, to compare runs."""
    return frozenset(key_fingerprint(words_of(state.key)) for state in states_in(opt_state))


def is_ensemble(opt_state: PyTree) -> bool:
    """Returns whether the ledgers have a leading axis for the runs of an ensemble."""
    return any(jnp.ndim(state.count) for state in states_in(opt_state))


def runs_of(opt_state: PyTree) -> list[PyTree]:
    """Returns the state of each run, given by the leading axis of all arrays."""
    states = states_in(opt_state)
    for state in states:
        check_imprint(state)
    # One axis of the same length in all ledgers: the runs of the ensemble.
    shapes = {jnp.shape(state.count) for state in states}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(
            "The ledgers of an ensemble must have one leading axis over its runs, got counts of "
            f"shapes {sorted(shapes)}. For one run, use `dpoptax.accounting.guarantee`."
        )
    return [
        [jax.tree.map(lambda x, i=i: x[i], state) for state in states]
        for i in range(next(iter(shapes))[0])
    ]


def _check_refusals(state: NoiseState) -> None:
    bits = refusals_so_far(state)
    if not bits:
        return
    reasons = [reason for bit, reason in _REASONS.items() if bits & bit]
    if bits & OTHER_MECHANISM:
        # The first four words are the float64 numbers σ and B (`Imprint`).
        sigma, size = np.asarray(state.imprint.values)[:4].view(np.float64)
        mechanism = state.mechanism
        same = (sigma, size) == (mechanism.noise_multiplier, mechanism.batch_size)
        reasons.append(
            "both have the same noise multiplier and batch size, so the schedule, strategy, "
            f"sampler or kind of noise differs from the chain's: {mechanism.checkpoint_key!r}"
            if same
            else f"the arrays have noise_multiplier={sigma:g}, batch_size={size:g}, but the chain "
            f"has noise_multiplier={mechanism.noise_multiplier:g}, "
            f"batch_size={mechanism.batch_size:g}"
        )
    raise ValueError(
        f"This noise state has no valid epsilon: {'; '.join(reasons)}. All releases since are NaN. "
        "Go back to the last valid state and the chain that made it, or start a new run with "
        "`tx.init` and account for both runs."
    )
