"""Builds the optimizer, the step and the identity of a task."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.runs import (
    Hidden,
    RunIdentity,
    data_of,
    digest_of,
    draw,
    draws_of,
    key_of_words,
    noise_key_of,
    noise_of,
    noise_stage,
    read_batch,
    sampler_of_run,
    seeded,
    settings,
    traced,
    tree_digest,
    words_of,
)
from dpoptax.sampling import Sampler
from dpoptax.training.data import streaming
from dpoptax.training.run import arguments, files, seeds
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.step import Step, make_step, on_one_device, optimizer_digest
from dpoptax.training.run.step_inputs import Inputs, input_shapes, inputs_of
from dpoptax.training.task import PlainPlan, Task, least_noise

_DIGEST = "`{}`, with everything that it closes over,"


@dataclasses.dataclass(frozen=True)
class RunProgram:
    """Builds everything that a run of a task computes.

    Attributes:
        task: The task, with arrays on the devices.
        mesh: Devices along an axis "data" that share each batch. None: one device.
        key: The noise key. By default a constant one, for programs that do not depend on it.
    """

    task: Task
    mesh: Mesh | None = None
    key: jax.Array = dataclasses.field(
        default_factory=lambda: key_of_words(np.zeros(2, np.uint32)), repr=False
    )

    @functools.cached_property
    def random(self) -> bool:
        """Whether the loss takes a key."""
        task = self.task
        if task.grad_fn is not None:
            return "key" in arguments.required("grad_fn", task.grad_fn)
        return len(arguments.required("loss_fn", task.loss_fn)) > 2

    def noise(self) -> optax.GradientTransformation | None:
        """Returns the noise stage, or None without noise."""
        plan = self.task.plan
        if isinstance(plan, PlainPlan):
            return None if plan.noise is None else plan.noise(self.key)
        return noise_stage(plan, self.key, self.task.applied_clip)

    def chain(self) -> optax.GradientTransformation:
        """Returns the whole chain."""
        noise = self.noise()
        return optax.chain(*([] if noise is None else [noise]), self.task.optimizer)

    def first_state(self, params: Any, key: jax.Array | None = None) -> Any:
        """Returns the initial state of the chain on the devices, or of that of another key."""
        program = self if key is None else dataclasses.replace(self, key=key)
        return arguments.on_devices("optimizer", program.chain().init(params), self.mesh)

    def step(self) -> Step:
        """Returns the training step."""
        # Programs are kept for other runs, and must not keep data.
        task = dataclasses.replace(self.task, data=None, frozen=None, evaluate=None)
        return make_step(task, self.chain(), self.mesh)

    def sampler(self, opt_state: Any) -> Sampler:
        """Returns the sampler of the run with this optimizer state, with its seed."""
        plan = self.task.plan
        if isinstance(plan, PlainPlan):
            return seeded(plan.sampler, self.key)
        return sampler_of_run(plan, opt_state)

    def feed(self, opt_state: Any) -> Callable[[int], Inputs]:
        """Returns the inputs of the steps of the run with this optimizer state."""
        task, key = self.task, self.key
        if not isinstance(task.plan, PlainPlan):
            key = noise_key_of(opt_state)
        secret = seeds.random_key(key) if self.random else None
        sharding = None if self.mesh is None else NamedSharding(self.mesh, P("data"))
        sampler, read = self.sampler(opt_state), functools.partial(streaming.read, task.data)

        def load(step: int) -> Inputs:
            batch = read_batch(read, draw(sampler, task.users, step), sharding)
            return inputs_of(step, *batch, secret, sharding)

        return load

    def shown(self, params: Any, opt_state: Any) -> tuple[Any, ...]:
        """Returns the arguments of `evaluate`."""
        evaluate = self.task.evaluate
        if evaluate is not None and len(arguments.required("evaluate", evaluate)) > 1:
            return params, opt_state[-1]  # not the noise, with its key
        return (averaged(params, opt_state),)

    def metrics(self, shown: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the metrics of a record as JSON values."""
        evaluate = self.task.evaluate
        found = None if evaluate is None else evaluate(*shown)
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"`evaluate` must return a mapping of metrics or None, got {found!r}.")
        found = {str(name): np.asarray(value).tolist() for name, value in (found or {}).items()}
        if taken := found.keys() & files.FIELDS:
            raise ValueError(
                f"`evaluate` must not return {sorted(taken)}, which are fields of every record. "
                "Rename these metrics."
            )
        return found

    def identity(self, sampler: Sampler, args: Any) -> dict[str, Any]:
        """Returns everything that the releases rest on, except JAX's settings.

        Args:
            sampler: The sampler, with its seed.
            args: Arguments of a step on one device.
        """
        return {
            **draws_of(sampler, self.task.users),
            **noise_values(self.task.plan, self.key),
            **self._program(args),
            "`delta`": self.task.plan.delta,
        }

    def _program(self, args: Any) -> dict[str, Any]:
        """Returns the data, the optimizer and the program of the gradient."""
        task, mesh = self.task, self.mesh
        whole = make_step(dataclasses.replace(task, params=None), self.chain(), None)
        found = {
            **data_of(task.data, task.frozen, whole=False),
            "`optimizer`": Hidden(optimizer_digest(task.optimizer, args[0][0])),
        }
        if task.grad_fn is None:
            clip = task.applied_clip
            return {
                **found,
                "`clip`": clip if isinstance(clip, int | float) else repr(clip),
                "`microbatch_size`": task.microbatch_size,
                _DIGEST.format("loss_fn"): Hidden(digest_of(traced(whole, *args))),
            }
        if mesh is not None:  # the mesh is part of `grad_fn`, so its devices share the rows
            shared = mesh.shape["data"]
            args = on_one_device(args, -(-len(args[1].mask) // shared) * shared)
        return {**found, _DIGEST.format("grad_fn"): Hidden(digest_of(traced(whole, *args)))}

    def identity_of_any_run(self) -> RunIdentity:
        """Returns the part of the identity that all runs of the task share."""
        task = self.task
        plan = {
            "`sampler`": task.plan.sampler.law,
            "steps": task.steps,
            "`delta`": task.plan.delta,
            "`params`": Hidden(tree_digest(task.params)),
        }
        program = self._program(self.arguments())
        return RunIdentity({**settings(), **plan, **noise_values(task.plan, self.key), **program})

    def arguments(self) -> Any:
        """Returns shapes and types of the arguments of a step on one device."""
        task, rows = self.task, self.task.plan.sampler.padded_size
        state = jax.eval_shape(lambda p: (p, self.chain().init(p)), task.params)
        example = task.data
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(example)):
            example = streaming.read(task.data, np.zeros(1, np.int64))
        inputs = input_shapes(example, rows, task.users, random=self.random)
        return state, inputs, jax.eval_shape(lambda x: x, task.frozen)


def noise_values(plan: dpoptax.PrivacyPlan | PlainPlan, key: jax.Array) -> Mapping[str, Any]:
    """Returns the values that decide the noise of a run."""
    if not isinstance(plan, PlainPlan):
        return noise_of(plan, key)
    return {
        "The key of the run": Hidden(digest_of([words_of(key).hex()])),
        "`plan`": plan.reason,
        "`batch_size`": plan.sampler.batch_size,
    }


def bounds(plan: dpoptax.PrivacyPlan | PlainPlan, steps: Sequence[int]) -> dict[int, float | None]:
    """Returns a cheap upper bound on ε at each step count, for progress and records.

    With up to 50 counts, each is priced by itself, and the bound exceeds ε by about a percent. See
    `accounting.Guarantee.epsilon_curve`. Budgets and summaries use the exact ε.
    """
    if isinstance(plan, PlainPlan) or not least_noise(plan):
        return dict.fromkeys(steps)
    planned = dataclasses.replace(plan, steps=max(steps, default=1)).guarantee()
    curve = planned.epsilon_curve(steps, planned.stated_delta).tolist()
    return {s: e if np.isfinite(e) else None for s, e in zip(steps, curve, strict=True)}
