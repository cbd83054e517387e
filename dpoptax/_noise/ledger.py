"""The ledger: what a noise stage released, written into its state."""

import dataclasses
import math
import numbers
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from dpoptax._clip.checksum import mixed
from dpoptax._pricing.noise_schedule import Phases
from dpoptax._random.keys import fold_in, two_words
from dpoptax._serialization import register, serializable
from dpoptax._tree import PyTree, check_arrays

if TYPE_CHECKING:
    from dpoptax.matrix._strategies import Strategy

# Below it noise, or what it is made of, may be less than the smallest normal float32: flushed to
# zero it leaves a sum that is not.
_MIN_STDDEV = 2.0**-100
# A step that is run again must have the noise that it had: changes with how noise is drawn.
_DRAWN = {False: "Box-Muller, spread", True: "discrete Gaussian"}  # by `fixed_point`
# Why releases are refused, a bit each.
CHANGED_SUM, OTHER_MECHANISM, OTHER_KEY, EDITED, TOO_MANY = 1, 2, 4, 8, 16
# Releases that an int32 counts: behind them the count, and with it the noise, would stay the same.
_MAX_RELEASES = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What one noisy release is, for the accountant. Static and hashable.

    Attributes:
      noise_multiplier: σ, the noise's standard deviation over the sensitivity of the sum; the
        least of them under a schedule.
      batch_size: B, the expected number of examples in a sum.
      unproven: why no (ε, δ) may be stated for it; `None` where one may.
      strategy: how the noise is correlated over the releases, a `dpoptax.matrix.Strategy`; `None`
        where it is independent.
      fixed_point: whether the noise is of integers. Priced alike; but a run that goes on otherwise
        than it was begun would release a step that is run again with other noise.
      sensitivity: C of the sums of all releases, where noise of one is counted in the steps of
        another's grid: correlated noise of integers. `None` where each has its own.
      schedule: the first release of each phase, and its σ; `None` where all have one.
    """

    noise_multiplier: float
    batch_size: float
    unproven: str | None = None
    strategy: "Strategy | None" = None
    fixed_point: bool = False
    sensitivity: float | None = None
    schedule: Phases | None = None


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


def begin(mechanism: Mechanism, key: jax.Array, params: PyTree) -> Beginning:
    """The fields of a noise stage's state before any release.

    Raises:
      TypeError: a leaf of `params` is not an array.
      ValueError: `params` are shared by several hosts, and their keys differ.
    """
    register()
    check_arrays(params)
    _check_hosts(key, params)
    count = jnp.zeros([], jnp.int32)
    values = jnp.asarray(_values(mechanism))
    return {
        "count": count,
        "key": _copy_key(key),
        "mechanism": mechanism,
        "imprint": _signed(count, values, _fingerprint(key), jnp.zeros([], jnp.uint32)),
    }


def replace_key(state: State, key: jax.Array) -> State:
    """The state of a stage, begun with another key: for a run of its own, never within one."""
    imprint = imprint_of(state)
    signed = _signed(state.count, imprint.values, _fingerprint(key), imprint.refused)
    return dataclasses.replace(state, key=key, imprint=signed)


def check_state(state: LedgerState, mechanism: Mechanism) -> None:
    """Raises where types, shapes and statics show that `state` is not of a stage's own making."""
    check_imprint(state)
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
    found = _refusals(state.count, state.key, imprint_of(state), _values(mechanism), intact)
    return found | jnp.where(state.count < _MAX_RELEASES, 0, TOO_MANY).astype(jnp.uint32)


def refusals_so_far(state: LedgerState) -> int:
    """The reasons to refuse any further release, as one number; 0 for none."""
    found = _read_refusals(
        state.count, state.key, imprint_of(state), _values(state.mechanism), np.bool_(True)
    )
    return int(found)


def _refusals(
    count: jax.Array, key: jax.Array, imprint: Imprint, values: np.ndarray, intact: jax.Array
) -> jax.Array:
    sound = {
        CHANGED_SUM: intact,
        OTHER_MECHANISM: jnp.all(imprint.values == values),
        OTHER_KEY: jnp.all(imprint.key == _fingerprint(key)),
        EDITED: imprint.check == _check(count, imprint.values, imprint.key, imprint.refused),
    }
    found = imprint.refused
    for bit, fine in sound.items():
        found |= jnp.where(fine, 0, bit).astype(jnp.uint32)
    return found


# One program for the states of all mechanisms, in place of one for each of its operations.
_read_refusals = jax.jit(_refusals)


def count_release(state: State, refused: jax.Array) -> State:
    """The state after a release, counted, refused or not."""
    return _counted(state, optax.safe_increment(state.count), refused)


def count_releases(state: State, count: int, refused: int) -> State:
    """A new state as it is after so many releases, for whoever replays a run apart."""
    return _counted(state, jnp.int32(count), jnp.uint32(refused))


def _counted(state: State, count: jax.Array, refused: jax.Array) -> State:
    imprint = imprint_of(state)
    signed = _signed(count, imprint.values, imprint.key, refused)
    return dataclasses.replace(state, count=count, imprint=signed)


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
            f"batch_size={batch_size}: want the expected number of examples, or of users, a step, "
            "above 0"
        )
    return float(noise_multiplier), batch_size


def check_scale(mechanism: Mechanism, sensitivity: float) -> None:
    """Raises where the noise on a sum is too small for float32."""
    stddev = mechanism.noise_multiplier * sensitivity
    if 0.0 < stddev < _MIN_STDDEV:
        raise ValueError(
            f"noise_multiplier={mechanism.noise_multiplier} times the sum's sensitivity, "
            f"{sensitivity}, is {stddev:.3g}: noise as small as that may be flushed to zero where "
            f"the sum is not. Want at least {_MIN_STDDEV:.3g}: scale the loss and the clip bound"
        )


def _check_hosts(key: jax.Array, params: PyTree) -> None:
    """Raises where hosts would each add other noise to one sum, and so release it several times."""
    shared = (isinstance(x, jax.Array) and not _is_local(x) for x in jax.tree.leaves(params))
    if not any(shared) or isinstance(key, jax.core.Tracer):
        return
    own = np.asarray(_fingerprint(key))
    if not np.all(multihost_utils.process_allgather(own) == own):
        raise ValueError(
            "the hosts of this run have different keys: each would add noise of its own to the "
            "same sums, and so release them once more than is counted. Give all hosts one key, "
            "made of what they share: the same seed, or bits that one host drew and "
            "jax.experimental.multihost_utils.broadcast_one_to_all handed on"
        )


def _is_local(x: jax.Array) -> bool:
    return isinstance(x, jax.core.Tracer) or x.is_fully_addressable


def _copy_key(key: jax.Array) -> jax.Array:
    """A copy: a state that is donated must not delete the key of the closure."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.array(key, copy=True)
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


def check_imprint(state: LedgerState) -> None:
    """Raises where a ledger's arrays are of other types than it was begun with."""
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


def _values(mechanism: Mechanism) -> np.ndarray:
    both = np.array([mechanism.noise_multiplier, mechanism.batch_size], np.float64)
    rest: list[object] = [mechanism.unproven, mechanism.strategy, _DRAWN[mechanism.fixed_point]]
    rest += [x for x in (mechanism.sensitivity, mechanism.schedule) if x is not None]
    return np.append(both.view(np.uint32), np.uint32(zlib.crc32(repr(tuple(rest)).encode())))


def _fingerprint(key: jax.Array) -> jax.Array:
    # No step's key: there are not so many steps, and `step_keys` of the trainer takes 2³² − 1.
    return two_words(fold_in(key, 2**32 - 2))


def _signed(count: jax.Array, values: jax.Array, key: jax.Array, refused: jax.Array) -> Imprint:
    return Imprint(values, key, refused, _check(count, values, key, refused))


def _check(count: jax.Array, values: jax.Array, key: jax.Array, refused: jax.Array) -> jax.Array:
    words = jnp.concatenate(
        [jnp.stack([jnp.asarray(count).astype(jnp.uint32), refused]), values, key]
    )
    places = np.arange(1, 1 + words.size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return jnp.sum(mixed(words ^ places), dtype=jnp.uint32)
