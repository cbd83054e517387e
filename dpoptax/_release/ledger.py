"""Records releases in the state of a noise stage (the ledger)."""

import dataclasses
import math
import zlib
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._random.keys import two_words
from dpoptax._support.argument_checks import check_known
from dpoptax._support.host_communication import check_same_on_hosts
from dpoptax._support.serialization import SerializableState, register
from dpoptax._support.tree import PyTree, check_arrays, kind_of

if TYPE_CHECKING:
    from dpoptax._pricing.noise_schedule import Phases
    from dpoptax.matrix._participation import Strategy
    from dpoptax.sampling import Sampler

# Smaller noise, or a term in its computation, may be below the smallest normal float32. It could be
# flushed to zero although the sum is not.
_MIN_STDDEV = 2.0**-100
# A repeated step must get the same noise as before. Raise the version of a name if its algorithm
# changes.
_DRAWN = {False: "box_muller_spread/4", True: "discrete_gaussian/4"}  # by `fixed_point`
# Reasons for refused releases, one bit each.
OTHER_MECHANISM, OTHER_KEY, EDITED, TOO_MANY = 1, 2, 4, 8
# The largest count in an int32. Beyond it, the count and the noise would repeat.
_MAX_RELEASES = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Describes one noisy release for the accountant. Static and hashable.

    Attributes:
      noise_multiplier: σ, the standard deviation of the noise divided by the sensitivity of the
        sum; the smallest σ of a schedule.
      batch_size: B, the expected number of examples in a sum.
      unproven: the reason why no (ε, δ) may be stated for the release; `None` if it has a proof.
      strategy: the correlation of the noise across releases, a `dpoptax.matrix.Strategy`; `None`
        for independent noise.
      fixed_point: whether the noise consists of integers. The price is the same, but a repeated
        step has other noise.
      sensitivity: C of all sums, if all steps have the same grid, as for correlated noise of
        integers; `None` if each sum has its own.
      schedule: the first release of each phase and its σ; `None` for a constant σ.
      sampler: `Sampler.law` of the batches, for the noise of a run; `None` if it is unknown.
    """

    noise_multiplier: float
    batch_size: float
    unproven: str | None = None
    strategy: "Strategy | None" = None
    fixed_point: bool = False
    sensitivity: float | None = None
    schedule: "Phases | None" = None
    sampler: str | None = None

    @property
    def phases(self) -> "Phases":
        """The first release and the σ of each phase, one if σ is constant."""
        return self.schedule or ((0, self.noise_multiplier),)

    @property
    def checkpoint_key(self) -> str:
        """A versioned text that identifies the release, except for σ and B.

        The imprint stores its checksum. So its form is part of the format of checkpoints: a new
        field adds a line if it is set, and changes nothing otherwise. Messages are left out.
        """
        optional = {
            # Only that there is a reason is part of the key. None leaves a line out.
            "unproven": self.unproven is not None or None,
            "strategy": self.strategy and self.strategy.checkpoint_key,
            "sensitivity": self.sensitivity and float(self.sensitivity).hex(),
            "schedule": self.schedule
            and " ".join(f"{first}:{float(sigma).hex()}" for first, sigma in self.schedule),
            "sampler": self.sampler,
        }
        lines = [f"{name} {value}" for name, value in optional.items() if value is not None]
        return "\n".join(["mechanism/1", f"noise {_DRAWN[self.fixed_point]}", *lines])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Imprint(SerializableState):
    """Holds a copy of a ledger's mechanism and key in arrays, for checkpoints.

    Attributes:
      values: σ and B as the words of a float64, and a checksum of `Mechanism.checkpoint_key`,
        uint32 of shape (5,).
      key: a fingerprint of the key that does not reveal it, uint32 of shape (2,).
      refused: the reasons for refused releases, one bit each, uint32; 0 for none.
      check: a checksum of the fields above and of the count, uint32.
      points: the `points_code` of the points where the gradients of the last release were taken,
        uint32; 0 if unknown. It does not affect privacy and is not in the checksum.
    """

    values: jax.Array
    key: jax.Array
    refused: jax.Array
    check: jax.Array
    points: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoiseState(SerializableState):
    """Holds the state of a noise stage, including the ledger of its releases.

    Attributes:
      count: the number of noisy releases so far, int32.
      key: the typed key that each step's key is folded from.
      mechanism: the mechanism of each release. Static.
      imprint: the mechanism as arrays, which `update` and `ledgers` compare with `mechanism`, and
        the reasons for refused releases.
    """

    count: jax.Array
    key: jax.Array
    mechanism: Mechanism = dataclasses.field(metadata={"static": True})
    imprint: Imprint


State = TypeVar("State", bound=NoiseState)


def begin(mechanism: Mechanism, key: jax.Array, params: PyTree) -> NoiseState:
    """Returns the state of a noise stage before any release.

    Raises:
      TypeError: a leaf of `params` is not an array.
      ValueError: several hosts share `params` but have different keys.
    """
    register()
    check_arrays(params)
    _check_hosts(mechanism, key, params)
    count = jnp.zeros([], jnp.int32)
    values = jnp.asarray(_values(mechanism))
    refused, points = jnp.zeros([], jnp.uint32), jnp.zeros([], jnp.uint32)
    # `_with_checksum` replaces `check` by the checksum.
    imprint = Imprint(values, key=_fingerprint(key), refused=refused, check=refused, points=points)
    return NoiseState(count, _copy_key(key), mechanism, _with_checksum(count, imprint))


def replace_key(state: State, key: jax.Array) -> State:
    """Returns a stage's state with another key, for a separate run."""
    imprint = dataclasses.replace(state.imprint, key=_fingerprint(key))
    return dataclasses.replace(state, key=key, imprint=_with_checksum(state.count, imprint))


def check_state(state: NoiseState, mechanism: Mechanism) -> None:
    """Raises an error if types, shapes or static fields of `state` do not match."""
    if not is_noise_state(state):
        raise TypeError(
            f"The noise stage needs its own state, got {kind_of(state)}. A checkpoint that was "
            "restored without a target holds arrays only. Restore it into `tx.init(params)`, and "
            "continue the run."
        )
    check_imprint(state)
    if state.mechanism != mechanism:
        raise ValueError(
            f"The state was made for {state.mechanism}, but this noise stage is {mechanism}. Pass "
            "the state to the chain that made it, or start a new run with `tx.init` and account "
            "for both runs."
        )


def refusals(state: NoiseState, mechanism: Mechanism) -> jax.Array:
    """Returns the reasons to refuse a release with a stage's mechanism, including earlier reasons.

    The reasons are bits of a uint32; 0 for none.
    """
    found = _refusals(state.count, state.key, state.imprint, _values(mechanism))
    # `safe_increment` stops at the largest count, and the last noise would be added again.
    return found | jnp.where(state.count < _MAX_RELEASES, 0, TOO_MANY).astype(jnp.uint32)


def refusals_so_far(state: NoiseState) -> int:
    """Returns the bits of the reasons to refuse further releases, 0 for none."""
    return int(_compiled_refusals(state.count, state.key, state.imprint, _values(state.mechanism)))


def _refusals(count: jax.Array, key: jax.Array, imprint: Imprint, values: np.ndarray) -> jax.Array:
    checksum = _checksum(count, imprint)
    # One reduction takes fewer kernels than three.
    found = [
        jnp.where(stored == expected, 0, bit).astype(jnp.uint32).ravel()
        for bit, stored, expected in (
            (OTHER_MECHANISM, imprint.values, values),
            (OTHER_KEY, imprint.key, _fingerprint(key)),
            (EDITED, imprint.check, checksum),
        )
    ]
    # A reason stays once it is set.
    return imprint.refused | jnp.bitwise_or.reduce(jnp.concatenate(found))


# Compiled once for all mechanisms. Without `jit`, every operation would be compiled.
_compiled_refusals = jax.jit(_refusals)


def count_release(state: State, refused: jax.Array, points_code: int) -> State:
    """Returns the state after a release, counted even if it was refused.

    `points_code` is that of its gradients.
    """
    # `full_like` keeps the placement of the array.
    code = jnp.full_like(state.imprint.points, np.uint32(points_code))
    imprint = dataclasses.replace(state.imprint, points=code)
    state = dataclasses.replace(state, imprint=imprint)
    return _with_count(state, optax.safe_increment(state.count), refused)


def count_releases(state: State, count: int, refused: int) -> State:
    """Returns the state after `count` releases, for replaying a run elsewhere."""
    return _with_count(state, jnp.int32(count), jnp.uint32(refused))


def _with_count(state: State, count: jax.Array, refused: jax.Array) -> State:
    imprint = dataclasses.replace(state.imprint, refused=refused)
    return dataclasses.replace(state, count=count, imprint=_with_checksum(count, imprint))


def is_noise_state(x: object) -> TypeGuard[NoiseState]:
    """Returns whether `x` is the state of a noise stage."""
    return isinstance(x, NoiseState)


def check_noise_and_batch_size(noise_multiplier: float, batch_size: float) -> tuple[float, float]:
    """Returns both numbers, or raises an error that names the invalid one."""
    check_known(noise_multiplier=noise_multiplier, batch_size=batch_size)
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(
            f"`noise_multiplier` must be finite and non-negative, got {noise_multiplier}."
        )
    if not (math.isfinite(batch_size) and batch_size > 0):
        raise ValueError(
            f"`batch_size` must be positive, got {batch_size}. Pass the expected number of "
            "examples, or of users, per step."
        )
    return float(noise_multiplier), batch_size


def checked_mechanism(
    noise_multiplier: float, batch_size: float, sampler: "Sampler | None" = None, **fields: Any
) -> Mechanism:
    """Returns the mechanism of a noise stage, with checked numbers and the law of its sampler."""
    checked = check_noise_and_batch_size(noise_multiplier, batch_size)
    return Mechanism(*checked, sampler=None if sampler is None else sampler.law, **fields)


def check_scale(mechanism: Mechanism, sensitivity: float) -> None:
    """Raises an error if the noise on a sum is too small for float32."""
    stddev = mechanism.noise_multiplier * sensitivity
    if 0.0 < stddev < _MIN_STDDEV:
        raise ValueError(
            f"`noise_multiplier` times the sensitivity must be at least {_MIN_STDDEV:.3g}, got "
            f"{mechanism.noise_multiplier} * {sensitivity} = {stddev:.3g}. Smaller noise may be "
            "flushed to zero in float32. Scale up the loss and the clipping bound."
        )


def _check_hosts(mechanism: Mechanism, key: jax.Array, params: PyTree) -> None:
    """Raises an error if hosts would add different noise to the same sum.

    The sum would be released once per host, but the ledger would count one release.
    """
    # Parameters that this host cannot read whole are spread over several hosts.
    shared = (isinstance(x, jax.Array) and not _is_local(x) for x in jax.tree.leaves(params))
    if not any(shared) or isinstance(key, jax.core.Tracer):
        return
    values = {"The noise key": np.asarray(_fingerprint(key)).tolist(), "The noise": mechanism}
    check_same_on_hosts(values)


def _is_local(x: jax.Array) -> bool:
    return isinstance(x, jax.core.Tracer) or x.is_fully_addressable


def _copy_key(key: jax.Array) -> jax.Array:
    """Copies a key, so that donating a state does not delete the key in the closure."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.array(key, copy=True)
    data = jnp.array(jax.random.key_data(key), copy=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def check_imprint(state: NoiseState) -> None:
    """Raises an error if a ledger's arrays have changed their dtypes."""
    for name, array in {"count": state.count, **vars(state.imprint)}.items():
        want = jnp.int32 if name == "count" else jnp.uint32
        if jnp.result_type(array) != want:
            raise ValueError(
                f"The ledger's `{name}` must be {jnp.dtype(want)}, got {jnp.result_type(array)}. "
                "The state was averaged or cast. Average only parameters, and leave the "
                "optimizer's state unchanged."
            )


def _values(mechanism: Mechanism) -> np.ndarray:
    # A float64 is two words of 32 bits, so σ and B are stored exactly.
    both = np.array([mechanism.noise_multiplier, mechanism.batch_size], np.float64)
    rest = zlib.crc32(mechanism.checkpoint_key.encode())
    return np.append(both.view(np.uint32), np.uint32(rest))


def _fingerprint(key: jax.Array) -> jax.Array:
    # No step has this number: runs have fewer steps, and the trainer's `random_key` uses 2³² − 1.
    return two_words(key, 2**32 - 2)


def _with_checksum(count: jax.Array, imprint: Imprint) -> Imprint:
    return dataclasses.replace(imprint, check=_checksum(count, imprint))


def _checksum(count: jax.Array, imprint: Imprint) -> jax.Array:
    first = jnp.stack([jnp.asarray(count).astype(jnp.uint32), imprint.refused])
    words = jnp.concatenate([first, imprint.values, imprint.key])
    # Mixing each word with its place makes the checksum depend on the order of words.
    places = np.arange(1, 1 + words.size, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return jnp.sum(_mixed(words ^ places), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Applies a bijection of 32 bits, so that changes do not cancel in a sum."""
    # The hash "lowbias32" (C. Wellons, 2018).
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
