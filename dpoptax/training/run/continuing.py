"""Tells a run of `dpoptax.training.fit` from other ones, and goes on with one that has begun."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dpoptax
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.data.fingerprints import fingerprint
from dpoptax.training.run import records, resume
from dpoptax.training.run.course import Context, Record
from dpoptax.users import UserTable


def identify(
    plan: dpoptax.PrivacyPlan,
    key: jax.Array,
    fixed_point: bool,
    step: jax.stages.Lowered,
    context: Context,
) -> resume.Identity:
    """Returns the identity of a run, without its data."""
    arithmetic = resume.arithmetic(plan.sampler, context.place, exact=fixed_point)
    if context.checkpoints is not None:
        arithmetic["training step"] = _digest(step)
    seed = plan.sampler.seed
    secrets = {"seed": seed.hex() if isinstance(seed, bytes) else seed, "key": _words(key)}
    return resume.Identity(_fields(plan, fixed_point), "", arithmetic, secrets)


def continued(
    plan: dpoptax.PrivacyPlan,
    key: jax.Array | None,
    fixed_point: bool,
    record: Record,
    workdir: Path,
) -> tuple[dpoptax.PrivacyPlan, jax.Array]:
    """Returns the plan with the seed of the begun run, and its key.

    Raises:
        ValueError: The plan or the key is that of another run.
    """
    resume.check_same_fields(_fields(plan, fixed_point), record, workdir)
    if key is not None and _words(key) != record["key"]:
        raise ValueError(
            f"`key` must be that of the run in {workdir}, got another one. Omit it to go on with "
            "the run, or pass another workdir for a new one."
        )
    words = jnp.asarray(record["key"], jnp.uint32)
    key = jax.random.wrap_key_data(words) if words.size == 2 else words
    seed = record["seed"]
    seed = bytes.fromhex(seed) if isinstance(seed, str) else seed
    sampler = dataclasses.replace(plan.sampler, seed=seed)
    return dataclasses.replace(plan, sampler=sampler), key


def _words(key: jax.Array) -> list[int]:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words: list[int] = np.asarray(jax.random.key_data(key) if typed else key).tolist()
    return words


def _fields(plan: dpoptax.PrivacyPlan, fixed_point: bool) -> dict[str, Any]:
    """Returns the values that must not change when a run goes on. Seed and key are its own."""
    fields = dataclasses.asdict(plan.sampler) | {
        "sampling": type(plan.sampler).__name__,
        "noise_multiplier": plan.noise_multiplier,
        "strategy": None if plan.strategy is None else repr(plan.strategy),
        "steps": None if plan.strategy is None else plan.steps,
        "fixed_point": fixed_point,
    }
    del fields["seed"]
    found: dict[str, Any] = records.plain(fields)
    return found


def fingerprint_of(
    plan: dpoptax.PrivacyPlan, data: Any, frozen: Any, users: UserTable | None
) -> str:
    owners = None if users is None else users.sample(plan.sampler, 0).records
    dataset = Dataset("data", data, {}, 0, owners=owners)
    return fingerprint(dataset, plan.sampler.seed, frozen={"frozen": frozen})


def _digest(lowered: jax.stages.Lowered) -> str:
    """Returns a hash of a program, without the values of large constants."""
    module: Any = lowered.compiler_ir()
    text = module.operation.get_asm(large_elements_limit=1000)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
