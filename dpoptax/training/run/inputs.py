"""Checks the arguments of `dpoptax.training.fit` and moves arrays to devices."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.runs import check_rows
from dpoptax.training import hosts
from dpoptax.training.data import streaming
from dpoptax.training.task import PlainPlan
from dpoptax.users import UserTable


def check_types(
    plan: "dpoptax.PrivacyPlan | PlainPlan", optimizer: optax.GradientTransformation
) -> None:
    """Raises if the plan or the optimizer has another type."""
    if not isinstance(plan, dpoptax.PrivacyPlan | PlainPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"`optimizer` must be an optax transformation, got {optimizer!r}. Pass "
            "`optax.MultiSteps(…).gradient_transformation()` for MultiSteps."
        )


def check_unused(**arguments: Any) -> None:
    """Raises if an argument is given that `grad_fn` replaces."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must not be given with `grad_fn`, got {value!r}. Pass it to "
                "`dpoptax.clipped_grad`, which makes `grad_fn`."
            )


def check_plain(noiseless: bool, loss_fn: Any, grad_fn: Any, budget: float | None) -> None:
    """Raises if an argument needs the noise or the price that a `PlainPlan` lacks."""
    inputs = {"budget": budget, "grad_fn": grad_fn if noiseless else None}
    for name, value in inputs.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None under a `PlainPlan`, got {value!r}.")
    if noiseless and takes_key(loss_fn):
        raise ValueError(
            "`loss_fn` must not take a key for training without privacy. Remove the key, or use a "
            "`PrivacyPlan`."
        )


def check_automatic(mesh: Mesh | None) -> None:
    """Raises if a mesh has explicit axes, which a given gradient and the step would not share."""
    if mesh is not None and set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"`mesh` must have automatic axes with `grad_fn`, got {mesh}. Make it by "
            "`jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,))`."
        )


def automatic(mesh: Mesh | None) -> Mesh | None:
    """Returns the mesh with automatic axes.

    Raises:
        ValueError: The mesh has no axis "data".
    """
    if mesh is None:
        return None
    names = mesh.axis_names
    if "data" not in names:
        raise ValueError(f"`mesh` must have an axis 'data' for the examples, got the axes {names}.")
    return Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))


def on_devices(name: str, tree: Any, mesh: Mesh | None) -> Any:
    """Copies arrays to the devices, sharded or replicated, for a step that donates them.

    Raises:
        TypeError: A leaf is not an array.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
            raise TypeError(
                f"`{name}` must be a tree of arrays, got a {type(leaf).__name__} at "
                f"{jax.tree_util.keystr(path) or 'its root'}. Split arrays from everything else, "
                "such as with eqx.partition or nnx.split."
            )
    return copied(_distribute(jax.tree.map(_strongly_typed, tree), mesh))


def _distribute(tree: Any, mesh: Mesh | None) -> Any:
    """Places arrays, which must be equal on all hosts, on every device.

    Arrays that are sharded over the mesh stay sharded. All others are replicated.
    """
    if mesh is None:
        return jax.device_put(tree)

    def sharding(x: Any) -> NamedSharding:
        given = x.sharding if isinstance(x, jax.Array) else None
        if (
            isinstance(given, NamedSharding)
            and given.mesh.axis_names == mesh.axis_names
            and np.array_equal(given.mesh.devices, mesh.devices)
        ):
            return NamedSharding(mesh, given.spec)
        return NamedSharding(mesh, P())

    return jax.tree.map(lambda x: hosts.place(x, sharding(x)), tree)


def _strongly_typed(x: Any) -> jax.Array:
    # Zeros like a weakly typed array lose its sharding.
    x = jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def shapes_of(params: Any) -> Any:
    """Returns shapes, types and shardings of parameters on the devices."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )


def param_specs(params: Any) -> Any:
    """Returns the `PartitionSpec` of each parameter, or None if all are replicated."""
    placed = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
    if all(sharding is None or sharding.is_fully_replicated for sharding in placed):
        return None
    return jax.tree.map(lambda leaf: leaf.sharding.spec, params)


@contextlib.contextmanager
def explains_optimizer(optimizer: optax.GradientTransformation, params: Any) -> Iterator[None]:
    """Adds a remedy to an error of the optimizer that does not come from the run."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    try:
        yield
    except (AttributeError, TypeError) as error:
        try:
            jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), shapes)
        except (AttributeError, TypeError):
            error.add_note(
                "`optimizer` must work as `optimizer.update(gradients, state, params)`. Optimizers "
                "that need the loss, such as `optax.lbfgs` and `reduce_on_plateau`, would read "
                "private data. `optax.lookahead` has its own parameters and needs your own loop, "
                "with `optax.lookahead(optax.chain(noise, optimizer), …)`."
            )
        raise


@jax.jit
def copied(tree: Any) -> Any:
    """Returns copies of arrays."""
    return jax.tree.map(jnp.copy, tree)


def checked_data(
    data: streaming.Source,
    plan: "dpoptax.PrivacyPlan | PlainPlan",
    users: UserTable | None,
    mesh: Mesh | None,
) -> streaming.Source:
    """Checks the data and moves them to the host if several devices share a batch.

    Raises:
        TypeError: A column has no length, or no records at integer indices.
        ValueError: The data do not fit the plan, or are not finite.
    """
    columns = streaming.columns(data)
    if any(isinstance(column, jax.ShapeDtypeStruct) for column in columns):
        raise ValueError(
            "`data` must hold the examples to train on them, got their shapes, which only plan a "
            "run. Pass the data, such as by --data-dir."
        )
    check_rows(data, plan.sampler, users, sources=True)
    found, checked = streaming.count_not_finite(data)
    if found:
        raise ValueError(
            f"`data` must be finite in float32, got NaN, infinity or a larger number in {found} of "
            f"{checked} examples. Remove these examples, whose gradients would count as zero."
        )
    if mesh is None:
        return data
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, data)


def takes_key(loss_fn: Callable[..., Any] | None) -> bool:
    """Returns whether a loss requires a third positional argument.

    Raises:
        TypeError: `loss_fn` is not a function.
    """
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be the loss of one example, got {loss_fn!r}.")
    return _required(loss_fn) > 2


def takes_state(evaluate: Callable[..., Any]) -> bool:
    """Returns whether `evaluate` requires the state of the optimizer next to the parameters.

    Raises:
        TypeError: `evaluate` is not a function.
    """
    if not callable(evaluate):
        raise TypeError(f"`evaluate` must be a function of the parameters, got {evaluate!r}.")
    return _required(evaluate) > 1


def requires_key(grad_fn: Callable[..., Any]) -> bool:
    """Returns whether a given gradient requires the keyword `key`.

    Raises:
        TypeError: `grad_fn` is not a function.
    """
    if not callable(grad_fn):
        raise TypeError(
            f"`grad_fn` must be a function from `dpoptax.clipped_grad`, got {grad_fn!r}."
        )
    key = inspect.signature(grad_fn).parameters.get("key")
    return key is not None and key.default is key.empty


def _required(function: Callable[..., Any]) -> int:
    """Returns the number of required positional arguments, except `frozen`."""
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name != "frozen"
        for name, parameter in inspect.signature(function).parameters.items()
    )
