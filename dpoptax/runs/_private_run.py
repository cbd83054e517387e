"""A run: one use of a plan, with its own noise key and batches."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Names of `runs` are imported on first use, because a run on one host compares no digests.
from dpoptax import runs
from dpoptax._pricing.privacy_event import PrivacyEvent, composed
from dpoptax._random.keys import (
    Generator,
    check_noise_key,
    generator_of,
    key_of_words,
    number_of_words,
    words_of,
)
from dpoptax._release.gaussian import gaussian_noise
from dpoptax._release.read_ledger import read_ledgers, states_in
from dpoptax._support.fingerprints import key_fingerprint, seed_fingerprint
from dpoptax._support.host_communication import check_same_on_hosts, shared_bytes
from dpoptax.accounting._guarantee import Guarantee
from dpoptax.accounting._runs import ledger_guarantee
from dpoptax.runs._batches import Batch, check_rows, draw, gather, read_ahead, read_batch
from dpoptax.sampling._base import SEED_BYTES, Sampler

if TYPE_CHECKING:
    from dpoptax._clips.clip import Clip
    from dpoptax._support.tree import PyTree
    from dpoptax.runs._plan_terms import PlanTerms
    from dpoptax.users import UserTable

_Item = TypeVar("_Item")


class PrivateRun:
    """Holds the secrets of one use of a plan, and hands out its noise and batches once.

    `PrivacyPlan.new_run` and `PrivacyPlan.continue_run` make it:

        run = plan.new_run()
        tx = optax.chain(run.noise(), optax.sgd(0.1))
        for batch in run.batches(data): ...
        print(run.guarantee(opt_state))

    The noise key is the only secret. The seed of the sampler is a hash of it:

        seed = SHAKE-256(key), of 128 bits, or of 256 bits for a ChaCha20 key

    So an optimizer state, which holds the key and counts the releases, is all that a run needs to
    continue. The run itself cannot be copied or pickled: both copies would add the same noise. A
    ChaCha20 key makes noise and batches cryptographic.

    Privacy: `guarantee` holds for a run that adds `noise` to sums of clipped gradients from its
    `batches`, each used for one release. Keep the run as secret as the data.

    Attributes:
      plan: the plan.
      step: the number of batches that were handed out.

    >>> import dpoptax
    >>> plan = dpoptax.PrivacyPlan(dataset_size=100, batch_size=10, steps=2, noise_multiplier=3.0)
    >>> run = plan.new_run()
    >>> [batch.step for batch in run.batches(np.zeros((100, 3)))], run.step
    ([0, 1], 2)
    """

    def __init__(self, plan: "PlanTerms", key: jax.Array, *, step: int = 0) -> None:
        """Starts the use of a plan with a noise key, after the first `step` steps."""
        self.plan, self.step = plan, step
        self._key = check_noise_key(key)
        # The batches follow from the key, so a checkpoint with the key restores both.
        self._sampler = seeded(plan.sampler, self._key)
        # The step at which this object began, and whether a state of the chain was made.
        self._first, self._state_made = step, False
        # Whether `noise` was called, and a mark of the newest iterator.
        self._chained, self._turn = False, object()
        self._in_use = False  # whether the last batch may still wait for its release
        # A continued run does not know how its earlier steps were drawn.
        self._drawn = step == 0  # whether `batches` drew all steps
        if plan.also:
            self._check_new()

    def __repr__(self) -> str:
        return f"PrivateRun({self.plan!r}, step={self.step})"  # without the key

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A run must not be copied or pickled, because both copies would add the same noise to "
            "the same batches. Start another run with `plan.new_run()`, or save the optimizer "
            "state, which is all that `plan.continue_run(opt_state)` needs."
        )

    def _check_new(self) -> None:
        """Raises if key or seed are those of an event of `plan.also`."""
        seed, others = self._sampler.seed, self.plan.also
        assert seed is not None
        seeds, keys = frozenset([seed_fingerprint(seed)]), frozenset([self._fingerprint])
        # Only the fingerprints are compared here, so any event will do.
        composed(PrivacyEvent(others[0].dp_event, seeds, keys), others)

    @property
    def _fingerprint(self) -> str:
        return key_fingerprint(words_of(self._key))

    def noise(self, *, clip: "Clip | float | None" = None) -> optax.GradientTransformation:
        """Returns the noise transform, the first transform of the run's chain.

        This is `correlated_noise` if the plan has a strategy, `adaptive_gaussian_noise` if `clip`
        is an `adaptive_clip`, and `gaussian_noise` otherwise. It may be called once: two chains
        would add the same noise to two sums.

        Args:
          clip: the clip of all sums. Required for an `adaptive_clip`, and for correlated noise in
            fixed point.

        Raises:
          RuntimeError: the run has a chain already; or at `init`, because a state was made before
            and batches were handed out since.
          ValueError: `clip` is missing, or is adaptive under a schedule or a strategy.

        >>> import dpoptax
        >>> plan = dpoptax.PrivacyPlan(
        ...     dataset_size=100, batch_size=10, steps=5, noise_multiplier=1.0)
        >>> run = plan.new_run()
        >>> dpoptax.ledgers(run.noise().init(jnp.zeros(3)))[0].mechanism.batch_size
        10
        >>> run.noise()
        Traceback (most recent call last):
        ...
        RuntimeError: `noise` of a run must be called once, because ...
        """
        if self._chained:
            raise RuntimeError(
                "`noise` of a run must be called once, because two chains would add the same noise "
                "to two sums. Keep the transform, or start another run with `plan.new_run()`."
            )
        made = noise_stage(self.plan, self._key, clip)
        self._chained = True
        return optax.GradientTransformation(self._begins_once(made.init), made.update)

    def _begins_once(self, init: Callable[["PyTree"], Any]) -> Callable[["PyTree"], Any]:
        """Returns `init`, which raises if a second state would repeat the noise of the first."""

        def begin(params: "PyTree") -> Any:
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
                return init(params)  # the structure of a state
            # Before the first batch, no noise was used, so a second state is harmless.
            if self._state_made and self.step > self._first:
                raise RuntimeError(
                    "`init` must not be called again after the first batch of a run, because the "
                    "new state adds the same noise again, to other sums. Start another run with "
                    "`plan.new_run()`. To restore a checkpoint, use the current state or "
                    "`jax.eval_shape(tx.init, params)` as its structure."
                )
            self._state_made = True
            return init(params)

        return begin

    def batches(
        self,
        data: "PyTree",
        *,
        users: "UserTable | None" = None,
        sharding: "jax.sharding.NamedSharding | None" = None,
    ) -> Iterator[Batch]:
        """Yields the `Batch` of each remaining step: its rows of the data, mask and ids.

        Each leaf of the data must have N rows. A wrong N is an error, since JAX clamps indices
        beyond the end. Rows are gathered in a thread, one step ahead. Each batch is handed out
        once: another call continues after the last batch that was taken.

        Args:
          data: a tree of NumPy arrays, JAX arrays or memory-mapped arrays, with N rows each.
          users: the table of owners that made the sampler, if the plan draws users. The data then
            have a row for each record.
          sharding: how the batch is split over devices, such as `NamedSharding(mesh, P("data"))`.
            Each host reads only the rows of its devices. All hosts need the same data: each reads
            all of them once to compare them.

        Raises:
          TypeError: a leaf of `data` is not an array with rows.
          ValueError: a leaf of `data` has another number of rows, `users` does not fit the sampler,
            all batches were handed out, or hosts differ in the data, the plan or the key.
          RuntimeError: at the next batch, because another call of `batches` or `draws` has begun.

        >>> import dpoptax
        >>> plan = dpoptax.PrivacyPlan(
        ...     dataset_size=100, batch_size=10, steps=2, noise_multiplier=1.0)
        >>> run = plan.new_run()
        >>> next(run.batches(np.zeros((100, 3)))).step, next(run.batches(np.zeros((100, 3)))).step
        (0, 1)
        >>> run.batches(np.zeros((100, 3)))
        Traceback (most recent call last):
        ...
        ValueError: All 2 batches of the run were handed out. ...
        """
        check_rows(data, self._sampler, users)
        rows_of = functools.partial(gather, data)

        def load(step: int) -> Batch:
            drawn = draw(self._sampler, users, step)
            return Batch(step, *read_batch(rows_of, drawn, sharding))

        if sharding is not None and not sharding.is_fully_addressable:
            self._check_same_on_hosts(data, users)
        return self._handed_out(load)

    def draws(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields `(step, indices, mask)` of each remaining step, to gather rows by hand.

        Check that the data have N rows. Draws are handed out once, as by `batches`.
        """
        self._drawn = False
        return self._handed_out(lambda step: (step, *self._sampler.sample(step)))

    def _handed_out(self, load: Callable[[int], _Item]) -> Iterator[_Item]:
        """Returns an iterator over the remaining steps, which counts the steps that are taken."""
        if self.step >= self.plan.steps:
            raise ValueError(
                f"All {self.plan.steps:,} batches of the run were handed out. A second pass would "
                "release the same batches again. Plan more `steps`, or start another run with "
                "`plan.new_run()` and account for both, `also=[run.guarantee(opt_state)]`."
            )
        return self._taken(load)

    def _taken(self, load: Callable[[int], _Item]) -> Iterator[_Item]:
        self._turn = turn = object()
        for item in read_ahead(load, range(self.step, self.plan.steps)):
            if self._turn is not turn:
                raise RuntimeError(
                    "The batches of a run must be taken from one iterator, because another call of "
                    "`batches` or `draws` has begun, which continues after the batches taken."
                )
            self.step += 1
            # Until the next batch is asked for, this one may or may not have been released.
            self._in_use = True
            yield item
            self._in_use = False

    def _check_same_on_hosts(self, data: "PyTree", users: "UserTable | None") -> None:
        """Raises on all hosts unless they have the same plan, key, step, data and owners."""
        check_same_on_hosts(
            {
                "The step of the run": self.step,
                **runs.draws_of(self._sampler, users),
                **runs.noise_of(self.plan, self._key),
                **runs.data_of(data),
            }
        )

    def guarantee(self, opt_state: "PyTree") -> Guarantee:
        """Returns the guarantee of the run's releases, from the ledger in its optimizer state.

        While a batch is in use, one release may be missing. So a state that is thrown away after a
        step, such as one to warm up, is noticed when all batches were handed out.

        Args:
          opt_state: the state of the chain that starts with `noise`.

        Raises:
          ValueError: the state belongs to another run; it does not count one release for each batch
            that was handed out, except for the last one while it is in use; or
            `accounting.guarantee` raises it.
        """
        readings = read_ledgers(opt_state)
        if readings.keys != {self._fingerprint}:
            raise ValueError(
                "`opt_state` must hold the noise of this run only, got the state of another run or "
                "of several. Ask the run that made it, `plan.continue_run(opt_state)`, or "
                "`dpoptax.accounting.guarantee` for several noise stages."
            )
        released = readings.ledgers[0].releases
        if not self.step - self._in_use <= released <= self.step:
            raise ValueError(
                f"`opt_state` counts {released:,} releases, but the run has handed out "
                f"{self.step:,} batches. Each batch is for one release: a batch that is used "
                "twice, or a state that starts again, costs more than the ledger counts. To look "
                "at a batch, take one of another run. To go back to an earlier state, also "
                "restore the run: "
                "`plan.continue_run(opt_state)`."
            )
        plan = self.plan
        found = ledger_guarantee(readings, self._sampler, plan.also, plan.delta, plan.accountant)
        return dataclasses.replace(found, drawn=self._drawn)


def noise_stage(
    plan: "PlanTerms", key: jax.Array, clip: "Clip | float | None"
) -> optax.GradientTransformation:
    """Returns the noise transform of a plan for a key; see `PrivateRun.noise`."""
    noise: dict[str, Any] = {
        "noise_multiplier": plan.noise_multiplier,
        "batch_size": plan.sampler.batch_size,
        "key": key,
        "sampler": plan.sampler,
    }
    if getattr(clip, "own_stage", None):
        from dpoptax.contrib._adaptive import QuantileClip, adaptive_gaussian_noise

        if isinstance(clip, QuantileClip):
            _check_not_adaptive(plan, clip)
            return adaptive_gaussian_noise(clip, **noise, fixed_point=plan.fixed_point)
    if plan.strategy is not None:
        return _correlated_noise(plan, clip, noise)
    return gaussian_noise(**noise, fixed_point=plan.fixed_point)


def _check_not_adaptive(plan: "PlanTerms", clip: "Clip") -> None:
    """Raises if the noise of the plan cannot follow an adaptive clip."""
    if plan.strategy is not None or isinstance(plan.noise_multiplier, Mapping):
        raise ValueError(
            "`clip` must not be adaptive under a schedule of noise or with correlated noise, got "
            f"{clip}."
        )


def _correlated_noise(
    plan: "PlanTerms", clip: "Clip | float | None", noise: Mapping[str, Any]
) -> optax.GradientTransformation:
    from dpoptax._release.correlated import correlated_noise

    assert plan.strategy is not None
    if plan.fixed_point and clip is None:
        raise ValueError(
            "`clip` must be the clip of all sums for correlated noise in fixed point, got None."
        )
    return correlated_noise(
        plan.strategy, **noise, fixed_point_clip=clip if plan.fixed_point else None
    )


def continued(plan: "PlanTerms", opt_state: "PyTree") -> PrivateRun:
    """Returns the run of an optimizer state, after the steps that its ledger counts.

    Raises:
      ValueError: the state holds another number of noise stages than one, or its noise is not that
        of the plan.
    """
    ledger, *others = read_ledgers(opt_state).ledgers
    if others:
        raise ValueError(
            f"`opt_state` must have one noise stage, got {1 + len(others)}. Use `gaussian_noise` "
            "and a sampler, and keep the sampler's seed."
        )
    key, found = noise_key_of(opt_state), ledger.mechanism
    # Only the bound of a clip is part of the mechanism, as a number C is, and only for correlated
    # noise in fixed point. The mechanism does not depend on the parameters, so any array will do.
    stage = noise_stage(plan, key, found.sensitivity)
    planned = read_ledgers(stage.init(jnp.zeros(1))).ledgers[0].mechanism
    if found != planned:
        raise ValueError(
            f"`opt_state` must have the noise of the plan, {planned}, got {found}. Pass the plan "
            "that the run was started with."
        )
    return PrivateRun(plan, key, step=ledger.releases)


def noise_key_of(opt_state: "PyTree") -> jax.Array:
    """Returns the key of the first noise stage in an optimizer's state."""
    return states_in(opt_state)[0].key


def sampler_of_run(plan: "PlanTerms", opt_state: "PyTree") -> Sampler:
    """Returns the sampler with the seed of the run that an optimizer state belongs to.

    For trainers that draw steps by their number: each draw is for one release.
    """
    return continued(plan, opt_state)._sampler


def seeded(sampler: Sampler, key: jax.Array) -> Sampler:
    """Returns the sampler with a seed that is a hash of a noise key and does not reveal it."""
    ciphered = generator_of(key) == "chacha20"
    # The prefix makes the seed differ from all other hashes of the key.
    text = b"dpoptax sampler seed of a noise key\0" + words_of(key)
    seed = hashlib.shake_256(text).digest(SEED_BYTES if ciphered else 16)
    return dataclasses.replace(sampler, seed=seed if ciphered else int.from_bytes(seed))


def shared_key(generator: Generator) -> jax.Array:
    """Draws a noise key from the operating system, equal on all hosts."""
    return key_of_words(np.frombuffer(shared_bytes(4 * number_of_words(generator)), np.uint32))
