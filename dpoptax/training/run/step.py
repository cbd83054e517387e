"""Defines the training step of every run and compiles it once."""

import functools
import hashlib
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.runs import digest_of, traced
from dpoptax.training.run.arguments import param_specs
from dpoptax.training.run.step_inputs import Inputs
from dpoptax.training.task import Task
from dpoptax.users import per_user_loss

# In bytes. Programs with larger constants are not compared.
_LARGEST_CONSTANTS = 2**20


Step: TypeAlias = Callable[..., tuple[Any, Any]]
"""`step(state, inputs, frozen)` maps parameters and optimizer state to the next ones."""

# The newest compiled steps, by everything that decides them.
_COMPILED: dict[Hashable, Step] = {}
_KEPT = 64


def make_step(
    task: Task, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh | None
) -> Step:
    """Returns the training step of a task.

    Args:
        task: The task. Of its parameters, only the shardings are used.
        optimizer: The whole chain, including the noise.
        mesh: Devices along an axis "data" that share the examples. None: one device.
    """

    def step(state: tuple[Any, Any], inputs: Inputs, frozen: Any) -> tuple[Any, Any]:
        params, opt_state = state
        grads = _gradient(task, state, inputs, frozen, mesh)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def _gradient(
    task: Task, state: tuple[Any, Any], inputs: Inputs, frozen: Any, mesh: jax.sharding.Mesh | None
) -> Any:
    """Returns the clipped sum of a step, or the mean gradient of a baseline."""
    params, opt_state = state
    given, clip = task.loss_fn if task.grad_fn is None else task.grad_fn, task.applied_clip
    assert given is not None
    if frozen is not None:
        given = functools.partial(given, frozen=frozen)
    if task.grad_fn is None:
        if task.users is not None:
            given = per_user_loss(given)
        if clip is None:
            return _plain_gradient(task, given, params, inputs, mesh)
        given = dpoptax.clipped_grad(
            given,
            clip,
            microbatch_size=task.microbatch_size,
            mesh=mesh,
            param_specs=param_specs(task.params),
        )
    randomness = {} if inputs.key is None else {"key": inputs.key, "ids": inputs.ids}
    points = dpoptax.gradient_points(opt_state, params)
    found = given(points, inputs.examples, inputs.mask, **randomness)
    clipped = found[0] if isinstance(found, tuple) else found
    if task.grad_fn is not None and clip is not None:
        _check_clip(clipped, clip)
    return clipped


def _plain_gradient(
    task: Task,
    loss: Callable[..., Any],
    params: Any,
    inputs: Inputs,
    mesh: jax.sharding.Mesh | None,
) -> Any:
    """Returns the gradient of the sum of losses over the expected batch size."""

    def total_loss(params: Any, batch: Any, mask: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0))(params, batch), where=mask)

    def whole(params: Any, *rows: Any) -> Any:
        sums = dpoptax.extend.in_microbatches(
            lambda *rows: (jax.grad(total_loss)(params, *rows), None), task.microbatch_size
        )
        return sums(*rows)[0]

    if mesh is not None:
        local = whole
        whole = jax.shard_map(
            lambda *args: jax.lax.psum(local(*args), "data"),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    total = whole(params, inputs.examples, inputs.mask)
    return jax.tree.map(lambda leaf: leaf / task.plan.sampler.batch_size, total)


def _check_clip(clipped: Any, clip: dpoptax.Clip | float) -> None:
    """Raises a `ValueError` if a sum was not clipped by `clip`."""
    clip = clip if isinstance(clip, dpoptax.Clip) else dpoptax.l2_clip(clip)
    if isinstance(clipped, dpoptax.ClippedSum) and clipped.clip != clip:
        raise ValueError(
            f"`clip` must be that of `grad_fn`, {clipped.clip}, got {clip}. Leave it out "
            "unless the noise needs it."
        )


def _identity(
    program: jax.stages.Traced, lowered: jax.stages.Lowered, placed: Hashable
) -> Hashable | None:
    """Returns everything that decides a compiled program, or None if it is large or unknown.

    `placed` is the mesh and the shardings of the arguments, which the text does not name.
    """
    config: Any = jax.config
    if config.values.get("jax_use_simplified_jaxpr_constants", True):
        return None  # the text may lack constants
    if sum(each.size * each.dtype.itemsize for each in program.jaxpr.consts) > _LARGEST_CONSTANTS:
        return None
    text = lowered.as_text()
    if "callback" in text:  # it names a host function by its number only
        return None
    identity = (
        hashlib.sha256(text.encode()).hexdigest(),
        (lowered.in_tree, lowered.out_tree, str(lowered.in_avals)),
        (placed, config.jax_default_device),
        tuple((name, repr(getattr(config, name, None))) for name in sorted(config.values)),
    )
    try:
        hash(identity)
    except TypeError:  # a static part of the state is not hashable
        return None
    return identity


def on_one_device(args: Any, rows: int) -> Any:
    """Returns shapes and types of a step's arguments as on one device, for a digest.

    Args:
        args: As for `compiled_step`.
        rows: Number of rows of a batch that no devices share.
    """
    state, inputs, frozen = args
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), inputs._replace(key=None)
    )
    return jax.eval_shape(lambda *args: args, state, batch._replace(key=inputs.key), frozen)


def optimizer_digest(optimizer: optax.GradientTransformation, params: Any) -> str:
    """Returns the hash of an optimizer's operations and constants, such as a learning rate."""

    def both(params: Any) -> Any:
        state = optimizer.init(params)
        return state, optimizer.update(params, state, params)

    return digest_of(traced(both, params))


def compiled_step(step: Step, args: Any, mesh: jax.sharding.Mesh | None = None) -> Step:
    """Returns a compiled step, which equal steps and shapes share.

    It donates the arrays of the state. Under `jax.disable_jit()`, which is for stepping through a
    loss, it runs operation by operation and donates nothing.

    Args:
        step: The step. The optimizer state contains the noise key and the learning rate, so runs
            that differ only in these share a program.
        args: `((params, opt_state), inputs, frozen)`. Only shapes and types are used, and the
            shardings of the first and the last.
        mesh: Devices along an axis "data" that share the examples. None: one device.
    """
    config: Any = jax.config
    if config.jax_disable_jit:  # it does not support lowered programs
        return step
    trace = _trace(step, args, mesh)
    lowered = trace.lower()
    placed = mesh, *(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    identity = _identity(trace, lowered, placed)
    if identity is None:
        return lowered.compile()
    if identity not in _COMPILED:
        if len(_COMPILED) == _KEPT:
            del _COMPILED[next(iter(_COMPILED))]
        _COMPILED[identity] = lowered.compile()
    return _COMPILED[identity]


def _trace(step: Step, args: Any, mesh: jax.sharding.Mesh | None) -> jax.stages.Traced:
    shardings: dict[str, Any] = {}
    if mesh is not None:
        rows = NamedSharding(mesh, P("data"))
        whole = NamedSharding(mesh, P())
        state, frozen = jax.tree.map(lambda x: x.sharding or whole, (args[0], args[2]))
        inputs = Inputs(rows, rows, rows, whole)
        shardings = {"in_shardings": (state, inputs, frozen), "out_shardings": state}
    return jax.jit(step, donate_argnums=0, **shardings).trace(*args)
