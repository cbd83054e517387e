"""The ledger: what a noise stage released, written into its state, and who may read it."""

import dataclasses
import math
import numbers
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypedDict, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clips.clipped_sum import mixed
from dpoptax._serialization import serializable
from dpoptax._trees import PyTree

if TYPE_CHECKING:
    from dpoptax._strategies import Strategy

# Why releases are refused, a bit each.
CHANGED_SUM, OTHER_MECHANISM, OTHER_KEY, EDITED = 1, 2, 4, 8
_REASONS = {
    CHANGED_SUM: "the clipped sum was changed on its way to the noise stage (scaled, added to "
    "another, given another clip or reference), so that the clip's bound did not hold for it",
    OTHER_MECHANISM: "its arrays are those of another mechanism: they were restored into a chain "
    "with another noise multiplier, batch size or strategy",
    OTHER_KEY: "its key is not the one that it was begun with",
    EDITED: "its integers do not belong together: it was averaged with another, or edited",
}
_RESTART = (
    "take the last state before that, with the chain that made it, or start anew with tx.init and "
    "count both runs"
)


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What one noisy release is, for the accountant. Static and hashable.

    Attributes:
      noise_multiplier: σ, the noise's standard deviation over the sensitivity of the sum.
      batch_size: B, the expected number of examples in a sum.
      unproven: why no (ε, δ) may be stated for it; `None` where one may.
      strategy: how the noise is correlated over the releases, a `dpoptax.matrix.Strategy`; `None`
        where it is independent.
    """

    noise_multiplier: float
    batch_size: float
    unproven: str | None = None
    strategy: "Strategy | None" = None


class Ledger(NamedTuple):
    """The releases that an optimizer's state accounts for, as Python values.

    Attributes:
      mechanism: the `Mechanism` of each release.
      releases: how many there were.
    """

    mechanism: Mechanism
    releases: int


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Imprint:
    """What a ledger was begun with, in arrays, which go wherever a state's arrays go.

    Attributes:
      values: σ and B as the words of a float64, and a checksum of the rest, uint32 of shape (5,).
      key: a fingerprint of the key, which does not tell it, uint32 of shape (2,).
      refused: the reasons why releases are refused, a bit each, uint32; 0 for none.
      check: a checksum of the above and of the count, uint32.
    """

    values: jax.Array
    key: jax.Array
    refused: jax.Array
    check: jax.Array


class LedgerState(Protocol):
    """What the state of every noise stage has, whatever it keeps beside it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def count(self) -> jax.Array: ...
    @property
    def key(self) -> jax.Array: ...
    @property
    def mechanism(self) -> Mechanism: ...
    @property
    def imprint(self) -> Imprint | None: ...


State = TypeVar("State", bound=LedgerState)


class Beginning(TypedDict):
    """The fields of a `LedgerState` before any release."""

    count: jax.Array
    key: jax.Array
    mechanism: Mechanism
    imprint: Imprint


def begin(mechanism: Mechanism, key: jax.Array) -> Beginning:
    """The fields of a noise stage's state before any release."""
    count = jnp.zeros([], jnp.int32)
    values = jnp.asarray(_values(mechanism))
    return {
        "count": count,
        "key": _copy_key(key),
        "mechanism": mechanism,
        "imprint": _signed(count, values, _fingerprint(key), jnp.zeros([], jnp.uint32)),
    }


def with_key(state: State, key: jax.Array) -> State:
    """The state of a stage, begun with another key: for a run of its own, never within one."""
    imprint = imprint_of(state)
    signed = _signed(state.count, imprint.values, _fingerprint(key), imprint.refused)
    return dataclasses.replace(state, key=key, imprint=signed)


def check_state(state: LedgerState, mechanism: Mechanism) -> None:
    """Raises where types, shapes and statics show that `state` is not of a stage's own making."""
    _check_imprint(state)
    if state.mechanism != mechanism:
        raise ValueError(
            f"the state was made for {state.mechanism}, this noise stage is {mechanism}: give the "
            "state to the chain that made it, or start a new run with tx.init and count both"
        )


def refusals(state: LedgerState, mechanism: Mechanism, intact: jax.Array) -> jax.Array:
    """The reasons to refuse a release, those of the releases before included; uint32, 0 for none.

    Args:
      state: before the release.
      mechanism: the stage's own.
      intact: whether the clipped sum is as it was sealed.
    """
    imprint = imprint_of(state)
    sound = {
        CHANGED_SUM: intact,
        OTHER_MECHANISM: jnp.all(imprint.values == _values(mechanism)),
        OTHER_KEY: jnp.all(imprint.key == _fingerprint(state.key)),
        EDITED: imprint.check == _check(state.count, imprint.values, imprint.key, imprint.refused),
    }
    found = imprint.refused
    for bit, fine in sound.items():
        found |= jnp.where(fine, 0, bit).astype(jnp.uint32)
    return found


def after_release(state: State, refused: jax.Array) -> State:
    """The state after a release, counted, refused or not."""
    count = optax.safe_increment(state.count)
    imprint = imprint_of(state)
    signed = _signed(count, imprint.values, imprint.key, refused)
    return dataclasses.replace(state, count=count, imprint=signed)


def after_releases(state: State, count: int, refused: int) -> State:
    """A new state as it is after so many releases, for whoever replays a run apart."""
    imprint = imprint_of(state)
    total, bits = jnp.int32(count), jnp.uint32(refused)
    signed = _signed(total, imprint.values, imprint.key, bits)
    return dataclasses.replace(state, count=total, imprint=signed)


def ledgers(opt_state: PyTree) -> tuple[Ledger, ...]:
    """Returns the ledger of every noise stage in an optimizer's state, in tree order.

    Reads the arrays from the device, and compares them with each other and with the mechanisms that
    the state's structure names. An empty tuple means that nothing in the state adds noise.

    Args:
      opt_state: an optimizer's state, or any pytree around it, such as a restored checkpoint.

    Raises:
      ValueError: a ledger that refused a release, and why; arrays that are another mechanism's, key
        or ledger's; two stages with one key; a state of several runs, as `vmap` makes, which
        `dpoptax.accounting.ensemble_epsilon_spent` prices; a state of a version without imprints.
    """
    states = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_ledger) if is_ledger(leaf)]
    found: dict[bytes, int] = {}
    for i, state in enumerate(states):
        _check_imprint(state)
        if jnp.shape(state.count) != ():
            raise ValueError(
                f"a ledger's count has shape {jnp.shape(state.count)}: these are the states of "
                "several runs, and who sees them all learns from each. Price them together with "
                "dpoptax.accounting.ensemble_epsilon_spent"
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
    return tuple(Ledger(state.mechanism, int(state.count)) for state in states)


def runs_of(opt_state: PyTree) -> list[PyTree]:
    """The states of an ensemble's runs, from one whose arrays have the runs as leading axis."""
    states = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_ledger) if is_ledger(leaf)]
    for state in states:
        _check_imprint(state)
    shapes = {jnp.shape(state.count) for state in states}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(
            f"the ledgers' counts have shapes {sorted(shapes)}: want the state of an ensemble, one "
            "leading axis over its runs; dpoptax.accounting.epsilon_spent prices that of one run"
        )
    return [
        [jax.tree.map(lambda x, i=i: x[i], state) for state in states]
        for i in range(next(iter(shapes))[0])
    ]


def is_ledger(x: object) -> TypeGuard[LedgerState]:
    """Whether `x` is the state of a noise stage."""
    return isinstance(getattr(x, "mechanism", None), Mechanism)


def check_mechanism(noise_multiplier: float, batch_size: float) -> tuple[float, float]:
    """Returns the two as numbers, or raises with the name of the one that is wrong."""
    for name, value in (("noise_multiplier", noise_multiplier), ("batch_size", batch_size)):
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"{name}={value!r}: want a Python number, known before jit, since the stated ε "
                "rests on it"
            )
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier={noise_multiplier}: want a finite number >= 0")
    if not (math.isfinite(batch_size) and batch_size > 0):
        raise ValueError(
            f"batch_size={batch_size}: want the expected number of examples a step, above 0"
        )
    return float(noise_multiplier), batch_size


def _copy_key(key: jax.Array) -> jax.Array:
    """A copy: a state that is donated must not delete the key of the closure."""
    data = jnp.array(jax.random.key_data(key), copy=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def imprint_of(state: LedgerState) -> Imprint:
    """The imprint of a noise stage's state, or an error where it has none."""
    imprint = getattr(state, "imprint", None)
    if not isinstance(imprint, Imprint):
        raise ValueError(
            "this noise state has no imprint of its mechanism, as those of earlier versions: "
            "nothing shows which noise its releases had. Finish the run with the version that "
            "began it; or start a new one from its parameters with tx.init, and count both"
        )
    return imprint


def _check_imprint(state: LedgerState) -> None:
    imprint = imprint_of(state)
    kinds = {
        "count": (state.count, jnp.int32),
        **{f.name: (getattr(imprint, f.name), jnp.uint32) for f in dataclasses.fields(imprint)},
    }
    for name, (array, want) in kinds.items():
        if jnp.result_type(array) != want:
            raise ValueError(
                f"the ledger's {name} is {jnp.result_type(array)}, not {jnp.dtype(want)}: the "
                "state was averaged or cast. Average parameters, and leave the optimizer's state "
                "as it is"
            )


def _raise_refusals(state: LedgerState) -> None:
    now = refusals(state, state.mechanism, jnp.bool_(True))
    bits = int(now)
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
        f"are NaN; {_RESTART}"
    )


def _values(mechanism: Mechanism) -> np.ndarray:
    both = np.array([mechanism.noise_multiplier, mechanism.batch_size], np.float64)
    rest = zlib.crc32(repr((mechanism.unproven, mechanism.strategy)).encode())
    return np.append(both.view(np.uint32), np.uint32(rest))


def _fingerprint(key: jax.Array) -> jax.Array:
    # No step's key: there are not so many steps, and `step_keys` of the trainer takes 2³² − 1.
    return jax.random.bits(jax.random.fold_in(key, 2**32 - 2), (2,), jnp.uint32)


def _signed(count: jax.Array, values: jax.Array, key: jax.Array, refused: jax.Array) -> Imprint:
    return Imprint(values, key, refused, _check(count, values, key, refused))


def _check(count: jax.Array, values: jax.Array, key: jax.Array, refused: jax.Array) -> jax.Array:
    words = jnp.concatenate(
        [jnp.stack([jnp.asarray(count).astype(jnp.uint32), refused]), values, key]
    )
    places = np.arange(1, 1 + words.size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return jnp.sum(mixed(words ^ places), dtype=jnp.uint32)
